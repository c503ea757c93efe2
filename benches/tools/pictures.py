"""Plots benchmark results: one panel per model, side by side, written without a display."""

from __future__ import annotations

from typing import Any


def panels(count: int) -> tuple[Any, Any]:
    """A figure and its row of `count` panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(5 * count, 4), squeeze=False)
    return figure, axes[0]

"""Plots benchmark results without a display: panels that share their vertical axis, plain numbers, one legend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXTS = {"wikitext2-test": "WikiText-2 test", "heldout-books": "unseen novels"}
"""Readable names of the texts."""

LOSS = "increase of the loss"
UNIT = "nats per token"


def panels(count: int, wide: int = 4) -> tuple[Any, list[Any]]:
    """A figure and its panels, row by row; the panels of a row share their vertical axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    wide = min(count, wide)
    figure, axes = pyplot.subplots(-(-count // wide), wide, squeeze=False, sharey="row", layout="constrained")
    figure.set_size_inches(4.4 * wide, 3.6 * len(axes) + 0.4)
    for axis in axes.flat[count:]:
        axis.remove()
    return figure, list(axes.flat[:count])


def logarithmic(axis: Any) -> None:
    """Give a panel a logarithmic vertical axis with plain numbers, once its lines are drawn."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high > 30 * low else (1.0, 2.0, 3.0, 5.0, 7.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def write(figure: Any, axes: list[Any], loss: str, file: Path) -> None:
    """Label the vertical axes with `loss`, put one legend below all panels, and save the figure."""
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel(f"{loss},\n{UNIT}")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
    figure.savefig(file, dpi=110)

"""Notes on a calibrated run: experts that saw too few tokens, and experts that were only rounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["coverage_notes", "listed"]

#: Maximum number of experts named in one sentence; the manifest lists all of them.
NAMED = 12


def coverage_notes(
    layers: Mapping[str, Mapping[str, Any]], minimum: int, *, priced: bool = False, emptied: bool = False
) -> tuple[str, ...]:
    """Return notes on layers with few or unused tokens, as complete sentences.

    Args:
        layers: the details of each layer's first projection: `tokens` (a list over experts) and `rounded` (experts
            without error compensation, with the reason).
        minimum: number of tokens below which an expert is named.
        priced: whether bits had a price; without one, experts without error compensation are rounded to nearest.
        emptied: whether an expert that no token reaches is stored with almost no bits.
    """
    notes: list[str] = []
    uncompensated = "quantized without error compensation" if priced else "rounded to nearest"
    fate = "stored with almost no bits, which went to experts with tokens" if emptied else uncompensated
    for layer, details in layers.items():
        tokens: Sequence[int] = details["tokens"]
        few = [expert for expert, count in enumerate(tokens) if 0 < count < minimum]
        unseen = [expert for expert, count in enumerate(tokens) if count == 0]
        failed = {int(e): reason for e, reason in details.get("rounded", {}).items() if int(e) not in set(unseen)}
        if unseen:
            notes.append(f"{layer}: no calibration token reached {listed(unseen)}; {fate}.")
        if few:
            notes.append(f"{layer}: fewer than {minimum} calibration tokens reached {listed(few)}.")
        if failed:
            notes.append(f"{layer}: {listed(list(failed))} {uncompensated}: {next(iter(failed.values()))}.")
    return tuple(notes)


def listed(experts: Sequence[int]) -> str:
    """Return `expert 3`, `experts 3, 4`, or the first dozen and the number of further ones."""
    names = ", ".join(map(str, experts[:NAMED]))
    more = f" and {len(experts) - NAMED} more" if len(experts) > NAMED else ""
    return f"expert{'s' if len(experts) > 1 else ''} {names}{more}"

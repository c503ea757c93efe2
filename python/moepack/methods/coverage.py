"""What a calibrated run has to tell: experts that saw too few tokens, experts that were only rounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["coverage_notes", "listed"]

#: Experts named in one sentence; the manifest lists all of them.
NAMED = 12


def coverage_notes(
    layers: Mapping[str, Mapping[str, Any]], minimum: int, *, priced: bool = False, emptied: bool = False
) -> tuple[str, ...]:
    """Full sentences about the layers that deserve one.

    Args:
        layers: by layer, the details of its first projection: `tokens` (a list over experts) and `rounded` (experts
            without error compensation, with the reason).
        minimum: tokens below which an expert is named.
        priced: whether bits had a price, so that experts are not rounded to nearest.
        emptied: whether an expert that no token reaches is given next to no bits.
    """
    notes: list[str] = []
    uncompensated = "quantized without error compensation" if priced else "rounded to nearest"
    fate = "almost empty, for their bits went where tokens are" if emptied else uncompensated
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
    """`expert 3`, `experts 3, 4`, or the first dozen and how many more."""
    names = ", ".join(map(str, experts[:NAMED]))
    more = f" and {len(experts) - NAMED} more" if len(experts) > NAMED else ""
    return f"expert{'s' if len(experts) > 1 else ''} {names}{more}"

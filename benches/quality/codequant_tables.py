"""Creates the tables of docs/methods/codequant.md from measured cells; `benches/quality/codequant.py` prints them.

A cell is a line of the results: model, bits ("4x8": of weights and activations), block, row, loss, and the share of
changed routes. Losses are shown as nats per token above the original model's; missing measurements are empty. Cells
with losses on further texts ("also") are trials for choosing settings; they are compared with no drift, which was the
default at that time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Cells = dict[tuple[str, str, str, str], dict[str, Any]]
"""By model, bits, block and row."""

WIDTHS = ("4x8", "4x4", "3x8", "3x4", "2x8", "2x4")
TRIED = ("4x16", "3x16", "2x16", "4x8", "3x8", "2x8", "4x4", "3x4", "2x4")
PEERS = (
    "RTN",
    "RTN, random rotation",
    "RTN, random rotation, online Hadamard",
    "k-means, Hessian weights",
    "CodeQuant",
    "CodeQuant, tuned without KL",
    "CodeQuant, tuned",
)
ABLATIONS = (
    "CodeQuant",
    "no online Hadamard",
    "random rotation",
    "no rotation",
    "no Hessian weights",
    "no refinement",
    "equation 8",
    "drift 0.75",
    "tokens weighted equally",
)
BLOCKED = {
    "RTN": "RTN",
    "RTN, random rotation, online Hadamard": "RTN, rotated",
    "k-means, Hessian weights": "k-means",
    "CodeQuant": "CodeQuant",
    "permutation": "CodeQuant with POG",
}


class Tables:
    """The measured cells and the original models' losses."""

    def __init__(self, found: Iterable[dict[str, Any]]) -> None:
        lines = list(found)
        self.originals = {line["model"]: line["loss"] for line in lines if line["row"] == "original"}
        self.cells: Cells = {
            (line["model"], line["bits"], line["block"], line["row"]): line
            for line in lines
            if line["row"] != "original"
        }
        self.models = list(self.originals)

    def rise(self, model: str, bits: str, block: str, row: str) -> str:
        """Nats per token above the original."""
        cell = self.cells.get((model, bits, block, row))
        return "" if cell is None else f"{cell['loss'] - self.originals[model]:+.4f}"

    def text(self) -> str:
        """All tables, in the order of the page."""
        if any("also" in cell for cell in self.cells.values()):
            return self.trials()
        parts = [self.widths(model) for model in self.models]
        return "\n\n".join([*parts, self.routes(), self.ablations(), self.drifts(), self.blocks()])

    def widths(self, model: str) -> str:
        """Methods by bits of weights and activations, one codebook per row."""
        columns = [_width(bits) for bits in WIDTHS]
        body = [(row, *(self.rise(model, bits, "row", row) for bits in WIDTHS)) for row in PEERS]
        return _table((f"{model}, over {self.originals[model]:.4f}", *columns), body)

    def trials(self) -> str:
        """The effect of settings by bits: mean, minimum and maximum over models and texts."""
        rows = sorted({row for *_, row in self.cells} - {"CodeQuant", "drift 0"})
        widths = [bits for bits in TRIED if any(bits == cell[1] for cell in self.cells)]
        body = [(_width(bits), *(self._against(bits, row) for row in rows)) for bits in widths]
        return _table(("a codebook a row", *rows), body)

    def _against(self, bits: str, row: str) -> str:
        found = []
        for model in self.models:
            tried, plain, usual = (self.cells.get((model, bits, "row", name)) for name in (row, "drift 0", "CodeQuant"))
            default = plain or usual
            if tried is None or default is None:
                return ""
            found.append(tried["loss"] - default["loss"])
            found += [tried["also"][text] - default["also"][text] for text in default["also"]]
        return f"{sum(found) / len(found):+.4f} ({min(found):+.4f} to {max(found):+.4f})"

    def routes(self) -> str:
        """Loss and changed routes with 4-bit weights and activations, one codebook per row."""
        names = [(model, row) for model in self.models for row in PEERS]
        body = []
        for model, row in names:
            if (cell := self.cells.get((model, "4x4", "row", row))) is not None:
                share = f"{100 * cell['routes_changed']:.2f}%"
                body.append((f"{model}, {row}", self.rise(model, "4x4", "row", row), share))
        return _table(("W4 A4", "loss", "routes changed"), body)

    def ablations(self) -> str:
        """The gain of each component with 4-bit weights and activations, one codebook per row."""
        body = [(row, *(self.rise(model, "4x4", "row", row) for model in self.models)) for row in ABLATIONS]
        return _table(("W4 A4, a codebook a row", *self.models), body)

    def drifts(self) -> str:
        """The effect of undoing drift with 8-bit activations, one codebook per row."""
        body = []
        for bits in ("4x8", "3x8", "2x8"):
            pairs = [[self.rise(model, bits, "row", row) for row in ("drift 0", "CodeQuant")] for model in self.models]
            body.append((_width(bits), *(" to ".join(pair) if all(pair) else "" for pair in pairs)))
        return _table(("no drift to 0.75 of it", *self.models), body)

    def blocks(self) -> str:
        """Methods with codebooks of 128 columns, for the measured pairs of model and bits."""
        body = []
        for model in self.models:
            for bits in WIDTHS:
                shown = [self.rise(model, bits, "128", row) for row in BLOCKED]
                if any(shown):
                    body.append((f"{model}, {_width(bits)}", *shown))
        return _table(("block of 128 columns", *BLOCKED.values()), body)


def _width(bits: str) -> str:
    return f"W{bits.replace('x', ' A')}"


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body if any(row[1:])])

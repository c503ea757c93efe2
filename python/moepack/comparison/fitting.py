"""Chooses settings with which each method meets a size, or comes as close below it as it can."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import EMBEDDING, ROLES
from moepack.methods import Auto, FineQuant, Method, Milo, Qmoe, Rate
from moepack.methods.files import kept_bytes
from moepack.methods.finequant.sizes import packed_bytes
from moepack.methods.qmoe.method import MOST_BITS as MOST_TERNARY
from moepack.methods.rate.method import MOST_BITS

__all__ = ["FITTING", "Wanted", "fitted"]

DENSE = ("attention", "shared", "mlp")
"""Roles that all methods except `auto` and `rate` pack, with 8 bits if bits are given."""


@dataclass(frozen=True)
class Wanted:
    """A target size.

    Attributes:
        checkpoint, model: the model to compress.
        size: bytes of all weight files.
        text: settings of the calibration; empty without calibration.
    """

    checkpoint: Checkpoint
    model: MoeModel
    size: int
    text: dict[str, Any]

    def bits(self, roles: tuple[str, ...], dense_bits: float = 0.0) -> float:
        """Return bits per weight of the experts and `roles`, or of the experts alone if `roles` take `dense_bits`."""
        experts = {part.packed_name: part.shape for layer in self.model.layers for part in layer.projections}
        linears = [linear for dense in self.model.dense for linear in dense.linears if linear.role in roles]
        packed = experts.keys() | {linear.source for linear in linears}
        room = 8 * (self.size - kept_bytes(self.checkpoint, self.model, packed))
        weights, dense = sum(map(math.prod, experts.values())), sum(math.prod(linear.shape) for linear in linears)
        return room / (weights + dense) if not dense_bits else (room - dense_bits * dense) / weights


def _rate(wanted: Wanted) -> Method:
    return Rate(min(0.997 * wanted.bits((EMBEDDING, *ROLES)), MOST_BITS), **wanted.text)


def _finequant(wanted: Wanted) -> Method:
    shapes = [part.shape for layer in wanted.model.layers for part in layer.projections]
    weights = sum(map(math.prod, shapes))
    rate = wanted.bits(DENSE)
    for bits in (8, 4, 3, 2):
        if rate * weights >= 8 * sum(packed_bytes(shape, bits, 128) for shape in shapes):
            return FineQuant(bits, "budget", rate, dense_bits=bits)
    raise ValueError("two bits in groups take more")


def _milo(wanted: Wanted) -> Method:
    bits = next((bits for bits in (8, 4, 3, 2) if wanted.bits(DENSE) >= bits + 0.3), None)
    if bits is None:
        raise ValueError("two bits in groups take more")
    return Milo(bits, memory_budget=wanted.size, device=wanted.text.get("device", "cpu"))


def _qmoe(wanted: Wanted) -> Method:
    if not wanted.text:
        raise ValueError("requires a text")
    rate = wanted.bits(DENSE, 8.25)
    if rate >= 2.4:
        return Qmoe(bits="2", dense_bits=8, **wanted.text)
    return Qmoe(bits_per_weight=min(0.99 * rate, MOST_TERNARY), dense_bits=8, **wanted.text)


FITTING: dict[str, Callable[[Wanted], Method]] = {
    "auto": lambda wanted: Auto(wanted.size, **wanted.text),
    "auto without a text": lambda wanted: Auto(wanted.size),
    "auto for speed": lambda wanted: Auto(wanted.size, prefer="speed", **wanted.text),
    "rate": _rate,
    "finequant": _finequant,
    "milo": _milo,
    "qmoe": _qmoe,
}
"""The methods that can be compared; each raises ValueError if it cannot meet the size."""


def fitted(name: str, wanted: Wanted) -> Method:
    """Return the method `name` with settings that meet a size.

    Raises:
        ValueError: the method cannot reach that size, or is unknown.
    """
    if name not in FITTING:
        raise ValueError(f"cannot compare '{name}'; available: {', '.join(FITTING)}")
    return FITTING[name](wanted)

"""Tensors whose bits are given by name, and the method that shares the rest of a size among the others."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar

from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.model import MoeLayer
from moepack.errors import OverrideError
from moepack.methods.base import Method, Pinned, Shape
from moepack.methods.mixins import linear_roles
from moepack.methods.overrides import UNPACKED, Named, decide

__all__ = ["Pin", "PinsBits", "check_bits", "pinned", "without"]


@dataclass(frozen=True)
class Pin:
    """A tensor whose bits are given.

    Attributes:
        name: name of the packed tensor.
        role: "experts", or the role of a linear layer.
        shape: experts, rows, columns.
        bits: the bits of each matrix; None for experts that no pattern names.
    """

    name: str
    role: str
    shape: Shape
    bits: tuple[float | None, ...]

    @property
    def one(self) -> float | None:
        """The bits of all matrices, or None if they differ."""
        return self.bits[0] if len(set(self.bits)) == 1 else None

    @property
    def weights(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)


class PinsBits(ABC):
    """A mixin for methods that can give single tensors other bits (`moepack.methods.overrides`)."""

    pinned_bits: ClassVar[str]
    """The bits that a tensor may have, in words."""

    pinned_roles: ClassVar[frozenset[str]]
    """The roles of linear layers that may have bits of their own, whether the other settings pack them or not."""

    splits_experts: ClassVar[bool] = False
    """Whether the method gives experts of one tensor different bits by itself."""

    def is_coded(self, pin: Pin) -> bool:
        """Return whether a tensor is packed as coded integers, because the method's own format has not these bits."""
        return pin.one is None and not self.splits_experts

    @abstractmethod
    def pin(self, pins: Sequence[Pin], checkpoint: Checkpoint, model: MoeModel) -> Mapping[str, Method]:
        """Return the methods that pack pinned tensors, by name. Tensors with the same method are solved together.

        A method that gives single tensors their bits by itself (`Method.pinned`) returns none.

        Args:
            pins: the tensors and their bits.
            checkpoint, model: the model to pack.

        Raises:
            OverrideError, ValueError: the method cannot give a tensor its bits.
        """


def pinned(method: Method, checkpoint: Checkpoint, model: MoeModel) -> Method:
    """Return a method whose bits by name are resolved for a model: its attribute `pinned` is set.

    Raises:
        OverrideError: a pattern matches nothing or has no effect, or the method cannot give a tensor the bits.
    """
    if not method.overrides or method.pinned is not None:
        return method
    if not isinstance(method, PinsBits):
        raise OverrideError(f"the method {method.name} has no bits by name; {_able()}")
    named, shapes = _named(method, model)
    decided = decide(method.overrides, named)
    roles = {name: role for name, (role, _) in shapes.items()}
    unpacked = _unpacked(decided, model)
    pins = [Pin(name, roles[name], shapes[name][1], bits) for name, bits in decided.items() if name not in unpacked]
    if foreign := [pin for pin in pins if pin.role not in ("experts", *method.pinned_roles)]:
        raise OverrideError(
            f"the method {method.name} does not pack this tensor ({foreign[0].role}); {_able(foreign[0].role)}",
            tensor=foreign[0].name,
        )
    coded = [pin for pin in pins if method.is_coded(pin)]
    pins = [pin for pin in pins if pin not in coded]
    found = copy(method)
    _set(found, Pinned({}, unpacked))
    try:
        methods = method.pin(pins, checkpoint, without(model, unpacked)) if pins else {}
    except OverrideError:
        raise
    except ValueError as error:
        raise OverrideError(f"the method {method.name} cannot give these bits: {error}") from error
    bits = {pin.name: pin.one for pin in pins if pin.one is not None}
    _set(found, Pinned({**methods, **_coded(found, coded)}, unpacked, bits))
    return found


def _set(method: Method, pinned: Pinned) -> None:
    object.__setattr__(method, "pinned", pinned)  # the method may be a frozen dataclass


def _coded(method: Method, pins: Sequence[Pin]) -> dict[str, Method]:
    """Return the methods of tensors that are coded beside a method."""
    if not pins:
        return {}
    from moepack.methods import method_class

    found: dict[str, Method] = method_class("rate").beside(method, pins)  # type: ignore[attr-defined]
    return found


def without(model: MoeModel, unpacked: Collection[str]) -> MoeModel:
    """Return a model in which some packed tensors are ordinary ones. The projections of a layer go together."""
    if not unpacked:
        return model
    layers = tuple(layer for layer in model.layers if layer.projections[0].packed_name not in unpacked)
    dense = tuple(
        replace(block, linears=tuple(each for each in block.linears if each.source not in unpacked))
        for block in model.dense
    )
    packed = {source for layer in layers for part in layer.projections for source in part.sources}
    checkpoint = model.layers[0].projections[0].checkpoint
    names = tuple(name for name in checkpoint.names() if name not in packed)
    known = set(model.dense_names) | {
        source for layer in model.layers for part in layer.projections for source in part.sources
    }
    return replace(
        model,
        layers=layers,
        dense=tuple(block for block in dense if block.linears),
        dense_names=tuple(name for name in names if name in known),
    )


def _named(method: Method, model: MoeModel) -> tuple[list[Named], dict[str, tuple[str, Shape]]]:
    """Return the tensors that patterns may match, and the role and the shape of each."""
    named: list[Named] = []
    shapes: dict[str, tuple[str, Shape]] = {}
    for layer in model.layers:
        for part in layer.projections:
            own = [(f"{layer.name}.{number}.{part.name}",) for number in range(layer.experts)]
            alone = [() if piece.index else (piece.tensor,) for piece in part.parts]
            stacked = {piece.tensor for piece in part.parts if piece.index}
            names = (f"{layer.name}.{part.name}", *sorted(stacked))
            experts = tuple(first + second for first, second in zip(own, alone, strict=True))
            named.append(Named(part.packed_name, names, experts))
            shapes[part.packed_name] = "experts", part.shape
    roles = linear_roles(method)
    for linear in (linear for block in model.dense for linear in block.linears):
        named.append(Named(linear.source, (linear.role,), packed=linear.role in roles))
        shapes[linear.source] = linear.role, (1, *linear.shape)
    return named, shapes


def _unpacked(decided: Mapping[str, tuple[float | None, ...]], model: MoeModel) -> frozenset[str]:
    """Return the tensors that stay unpacked.

    Raises:
        OverrideError: only a part of a layer's experts would stay unpacked.
    """
    unpacked = frozenset(name for name, bits in decided.items() if set(bits) == {UNPACKED})
    for layer in model.layers:
        _refuse_part(layer, unpacked, decided)
    if unpacked and all(layer.projections[0].packed_name in unpacked for layer in model.layers):
        raise OverrideError("these bits leave all experts of the model unpacked")
    return unpacked


def _refuse_part(layer: MoeLayer, unpacked: Collection[str], decided: Mapping[str, tuple[float | None, ...]]) -> None:
    names = [part.packed_name for part in layer.projections]
    part = next((name for name in names if UNPACKED in decided.get(name, ()) and name not in unpacked), None)
    if part is not None:
        raise OverrideError("16 bits leave only some of its experts unpacked; they are packed together", tensor=part)
    if 0 < len(packed := [name for name in names if name not in unpacked]) < len(names):
        left = next(name for name in names if name in unpacked)
        raise OverrideError(
            f"16 bits leave it unpacked, but not '{packed[0]}'; the experts of a layer are packed together, so give 16 "
            "bits to all their projections, or at most 8 to this one",
            tensor=left,
        )


def _able(role: str = "experts") -> str:
    """Return the methods that give bits by name to tensors of a role, and the bits that each can give, in words."""
    from moepack.methods import METHODS, method_class

    able = {name: found for name in METHODS if issubclass(found := method_class(name), PinsBits)}
    able = {name: found for name, found in able.items() if role in ("experts", *found.pinned_roles)}
    if not able:
        return "no method packs it"
    return "methods that give bits by name: " + "; ".join(f"{name} {found.pinned_bits}" for name, found in able.items())


def check_bits(bits: Collection[float], allowed: Collection[float], method: str, in_words: str) -> None:
    """Check that bits are allowed.

    Raises:
        OverrideError: they are not; the message says which are.
    """
    if lost := sorted(set(bits) - set(allowed)):
        raise OverrideError(
            f"the method {method} cannot give a tensor {lost[0]:g} bits: it gives {in_words}, and 16 leaves a tensor "
            f"unpacked; {_able()}"
        )

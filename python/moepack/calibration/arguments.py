"""Arguments that a model passes to its blocks besides the hidden states: masks, positions, rotary tables, and block
outputs.

The arguments are recorded once, with stand-ins in place of the blocks, and passed again whenever a block runs. Three
kinds are represented by placeholders: other outputs of the preceding block (`Carried`), states of the encoder
(`ENCODER`), and mappings through which blocks pass data to later ones (`Shared`).
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ENCODER", "Arguments", "Carried", "Shared", "StandIn", "Stopped", "mapped", "same", "tensors"]


@dataclass(frozen=True)
class Carried:
    """Placeholder for an output of the preceding block besides its hidden states."""

    number: int


@dataclass(frozen=True)
class Shared:
    """Placeholder for a mapping that blocks write into."""

    make: Callable[[], Any]


ENCODER = object()
"""Placeholder for the encoder's states."""


@dataclass(frozen=True)
class Arguments:
    """Positional and named arguments of a block, without its hidden states."""

    positional: tuple[Any, ...]
    named: dict[str, Any]

    def replaced(self, change: Callable[[Any], Any]) -> Arguments:
        """Return the arguments with `change` applied to each."""
        named = {name: change(value) for name, value in self.named.items()}
        return replace(self, positional=tuple(map(change, self.positional)), named=named)

    def marked(self, encoder: Tensor | None) -> Arguments:
        """Return the arguments with placeholders for values that differ between runs."""

        def mark(value: Any) -> Any:
            if encoder is not None and value is encoder:
                return ENCODER
            return Shared(type(value)) if isinstance(value, MutableMapping) and not value else value

        return self.replaced(mark)


def same(one: Any, other: Any, known: dict[tuple[int, int], bool] | None = None) -> bool:
    """Return whether two arguments are equal; objects without value semantics are equal if their types are.

    Args:
        one, other: the arguments.
        known: cached results for pairs of tensors, by their ids, because blocks receive the same masks.
    """
    known = {} if known is None else known
    if isinstance(one, Arguments) and isinstance(other, Arguments):
        return same((one.positional, one.named), (other.positional, other.named), known)
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        pair = id(one), id(other)
        if pair not in known:
            alike = one.shape == other.shape and one.dtype == other.dtype
            known[pair] = one is other or (alike and torch.equal(one, other))
        return known[pair]
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(same(*pair, known) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], known) for key in one)
    return bool(one == other) if isinstance(one, str | int | float | Carried) else True


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of nested tuples, lists, mappings and arguments, with each tensor in it changed; the order is fixed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Arguments):
        return value.replaced(lambda each: mapped(each, change))
    if isinstance(value, MutableMapping):
        copied = copy(value)
        copied.update((key, mapped(each, change)) for key, each in value.items())
        return copied
    if isinstance(value, tuple | list):
        changed = [mapped(each, change) for each in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return value


def tensors(value: Any) -> list[Tensor]:
    """The tensors of a nested structure, in the order of `mapped`."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, note)
    return found


class Stopped(Exception):
    """Ends the stack's forward pass after the last block of interest."""


class StandIn(nn.Module):
    """Takes a block's place: records its arguments and passes the hidden states on.

    Attributes:
        last: whether the forward pass ends here.
        outputs: number of outputs of a block besides the hidden states; None if it returns only these.
        change: function applied to the hidden states.
        arguments, hidden: arguments and hidden states of the last call.
    """

    def __init__(self, block: nn.Module, last: bool, outputs: int | None = None) -> None:
        super().__init__()
        # Not registered as a child: only attributes such as `attention_type` are read from it.
        self.__dict__["block"] = block
        self.last, self.outputs = last, outputs
        self.change: Callable[[Tensor], Tensor] = lambda hidden: hidden
        self.arguments = Arguments((), {})
        self.hidden = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)

    def forward(self, hidden: Tensor, *positional: Any, **named: Any) -> Any:
        """Record the arguments."""
        self.hidden, self.arguments = hidden, Arguments(positional, named)
        if self.last:
            raise Stopped
        hidden = self.change(hidden)
        return hidden if self.outputs is None else (hidden, *map(Carried, range(self.outputs)))

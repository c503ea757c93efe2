"""Parses calls of a decoder's `forward` under any version of transformers.

The parameter for keys and values has two spellings: `past_key_values` up to transformers 5.23, `cache` since 5.24.
Calls are bound by the signature of the installed class, so positional and keyword arguments are equivalent. Both
spellings are accepted, regardless of which one the class declares.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from transformers.cache_utils import Cache

__all__ = ["Call", "CallReader", "cache_argument", "cache_name", "cached"]

_SPELLINGS = ("cache", "past_key_values")


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a decoder's forward.

    Attributes:
        input_ids: `[batch, tokens]`, or None if embeddings are passed.
        inputs_embeds: `[batch, tokens, hidden]`, or None if ids are passed.
        attention_mask: `[batch, past and new tokens]`, or None.
        position_ids: positions of the new tokens, or None.
        cache: keys and values of past tokens, or None.
        use_cache: whether the caller requests the cache; None defers to the configuration.
        others: all other arguments, by name.
    """

    input_ids: torch.Tensor | None = None
    inputs_embeds: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    cache: Any = None
    use_cache: bool | None = None
    others: Any = None

    @property
    def given(self) -> tuple[str, torch.Tensor] | None:
        """The input and its name; None unless exactly one input was passed."""
        inputs = [(name, getattr(self, name)) for name in ("input_ids", "inputs_embeds")]
        found = [(name, value) for name, value in inputs if value is not None]
        return found[0] if len(found) == 1 else None


_NAMED = frozenset(Call.__slots__) - {"cache", "others"}


class CallReader:
    """Parses calls of one forward function.

    Attributes:
        signature: the signature without `self`.
        cache: the name of the parameter for keys and values; None if there is no such parameter.

    Args:
        forward: a method as found on its class; its first parameter is the module.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        signature = inspect.signature(forward)
        self.signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        self.cache = cache_name(forward)
        kinds = {name: parameter.kind for name, parameter in self.signature.parameters.items()}
        self._positional = [name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
        self._known = None if takes_all else frozenset(kinds)  # `Signature.bind` takes 20 us, and a step may take 700

    def read(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call | None:
        """Parse a call; return None if the forward would reject it."""
        if len(arguments) > len(self._positional):
            return None
        found = dict(zip(self._positional, arguments, strict=False))
        if found.keys() & keywords.keys() or (self._known is not None and not keywords.keys() <= self._known):
            return None
        found |= keywords
        spellings = [name for name in found if name == self.cache or name in _SPELLINGS]
        if len(spellings) > 1:
            return None
        cache = found.pop(spellings[0]) if spellings else None
        named = {name: found.pop(name) for name in _NAMED & found.keys()}
        found.pop("cache_position", None)  # transformers up to 5.13 passes the position twice
        return Call(cache=cache, others=found, **named)


def cache_name(function: Callable[..., Any]) -> str | None:
    """Return the name of the parameter for keys and values; None if there is no such parameter.

    Args:
        function: a forward, or a class of transformers outputs.
    """
    parameters = inspect.signature(function).parameters
    typed = (name for name, parameter in parameters.items() if _is_cache(parameter.annotation))
    return next((name for name in _SPELLINGS if name in parameters), None) or next(typed, None)


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Return keys and values as a keyword argument of the model's forward, in the spelling that is not deprecated."""
    return {_spelling(type(model).forward): cache}


@functools.cache
def _spelling(forward: Callable[..., Any]) -> str:
    """Return the name of a forward's parameter for keys and values. Cached, because each decoding step needs it."""
    return cache_name(forward) or _SPELLINGS[-1]


def cached(output: Any) -> Any:
    """Return the keys and values in a transformers output; None if it has none."""
    name = cache_name(type(output))
    return None if name is None else getattr(output, name)


def _is_cache(annotation: Any) -> bool:
    kinds = get_args(annotation) or (annotation,)
    return any(isinstance(kind, type) and issubclass(kind, Cache) for kind in kinds)

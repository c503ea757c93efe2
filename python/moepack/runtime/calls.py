"""Reading calls of a decoder's `forward`, under any version of transformers.

The parameter that takes keys and values has two spellings: `past_key_values` up to transformers 5.23, `cache` from 5.24
on. A call is bound by the signature of the installed class, so positional and keyword arguments count alike, and both
spellings are read whichever one the class has.
"""

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
        input_ids: `[batch, tokens]`, or None where embeddings are given.
        inputs_embeds: `[batch, tokens, hidden]`, or None where ids are given.
        attention_mask: `[batch, tokens before and now]`, or None.
        position_ids: of the tokens, or None.
        cache: keys and values of the tokens before, or None.
        use_cache: whether the cache is asked for; None leaves it to the configuration.
        others: every other argument that was given.
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
        """The input and its name; None unless there is exactly one."""
        inputs = [(name, getattr(self, name)) for name in ("input_ids", "inputs_embeds")]
        found = [(name, value) for name, value in inputs if value is not None]
        return found[0] if len(found) == 1 else None


_NAMED = frozenset(Call.__slots__) - {"cache", "others"}


class CallReader:
    """Reads the calls of one forward.

    Attributes:
        signature: without `self`.
        cache: the name of the parameter that takes keys and values; None if there is no such parameter.

    Args:
        forward: a function of a class, whose first parameter is the module.
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
        """Return what a call says; None for a call that the forward does not take."""
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
        found.pop("cache_position", None)  # transformers up to 5.13 repeats the position
        return Call(cache=cache, others=found, **named)


def cache_name(function: Callable[..., Any]) -> str | None:
    """Return the name of the parameter that takes keys and values; None if there is no such parameter.

    Args:
        function: a forward, or a class of transformers' outputs.
    """
    parameters = inspect.signature(function).parameters
    typed = (name for name, parameter in parameters.items() if _is_cache(parameter.annotation))
    return next((name for name in _SPELLINGS if name in parameters), None) or next(typed, None)


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Return keys and values as the keyword argument of a model's forward; the other spelling may be deprecated."""
    return {cache_name(type(model).forward) or _SPELLINGS[-1]: cache}


def cached(output: Any) -> Any:
    """Return the keys and values of an output of transformers; None if it has none."""
    name = cache_name(type(output))
    return None if name is None else getattr(output, name)


def _is_cache(annotation: Any) -> bool:
    kinds = get_args(annotation) or (annotation,)
    return any(isinstance(kind, type) and issubclass(kind, Cache) for kind in kinds)

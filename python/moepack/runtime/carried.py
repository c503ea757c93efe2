"""What a model computes from a sequence and keeps in its modules, which the next sequence must not meet.

Rotary frequencies of some kinds depend on the length of a sequence (`dynamic`, `longrope`, PhiMoE's factors). Their
modules keep what they have computed: of `dynamic`, the frequencies of the longest sequence so far, which a later and
shorter one would be read with. Models of images keep by how much positions differ from places.

`Carried` brings the modules back to what they are in a model that has just been loaded. As a hook of the model it does
so where a call begins a sequence, whoever calls. From there on frequencies follow from the largest position of a call.

Up to `limit` tokens they are the same for all lengths. Such sequences may share a pass, and the keys and values of
tokens that they begin with; longer ones may not.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache

__all__ = ["Carried", "carried_of"]

CONSTANT = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Kinds of rotary positions that do not depend on the length; any other kind is taken to depend on it."""

OFFSET = "rope_deltas"
"""The attribute in which models of images keep how positions differ from places."""


class Carried:
    """The values that a model keeps of a sequence.

    Attributes:
        limit: the most tokens of a sequence whose frequencies are those of any shorter one; None without such a bound.
        rereads: whether the model's own generation reads a sequence again when it grows beyond the limit.

    Args:
        model: a transformers model.
    """

    def __init__(self, model: nn.Module) -> None:
        rotary = [module for module in _decoder(model).modules() if not CONSTANT.issuperset(_kinds(module).values())]
        for module in rotary:
            _settle(module)
        self.limit = min(map(_limit, rotary), default=None)
        self.rereads = self.limit is not None and _rereads(model, self.limit)
        modules = [*rotary, *(module for module in model.modules() if OFFSET in vars(module))]
        self._fresh = [(module, {name: _copy(value) for name, value in _values(module).items()}) for module in modules]

    def __bool__(self) -> bool:
        """Whether the model keeps anything."""
        return bool(self._fresh)

    def depends_on(self, length: int) -> bool:
        """Whether the frequencies of a sequence depend on its length, in tokens."""
        return self.limit is not None and length > self.limit

    def reset(self) -> None:
        """Let the model be as it is before its first sequence."""
        for module, fresh in self._fresh:
            present = _values(module)
            for name in present.keys() - fresh.keys():
                delattr(module, name)
            for name, value in fresh.items():
                old, found = present.get(name), _copy(value)
                if isinstance(old, torch.Tensor) and isinstance(found, torch.Tensor):
                    found = found.to(old.device)
                if name in module._buffers:
                    module._buffers[name] = found
                else:
                    setattr(module, name, found)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Reset where a call begins a sequence; a hook of the model."""
        if torch.compiler.is_compiling():
            return
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        if cache is None or cache.get_seq_length() == 0:
            self.reset()


def carried_of(model: Any) -> Carried:
    """Return what a model keeps of a sequence, and let the model begin each one anew; again returns the same."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, Carried):
            return hook
    carried = Carried(model)
    if carried:
        model.register_forward_pre_hook(carried, with_kwargs=True)
    return carried


def _decoder(model: Any) -> nn.Module:
    """The part that reads text: rotary positions of towers are places in an image."""
    try:
        found = model.get_decoder()
    except AttributeError:
        return model  # type: ignore[no-any-return]
    return found if isinstance(found, nn.Module) else model


def _kinds(module: Any) -> dict[str | None, str]:
    """The kinds of rotary positions that a module computes, by the kind of layer."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return {None: kinds}
    return {layer: kind for layer, kind in kinds.items() if isinstance(kind, str)} if isinstance(kinds, Mapping) else {}


def _limit(module: Any) -> int:
    """The longest sequence that has the frequencies of a single token; 0 if the module does not say."""
    parameters = getattr(module.config, "rope_parameters", None) or {}
    limits = []
    for layer, kind in _kinds(module).items():
        if kind in CONSTANT:
            continue
        own = parameters if layer is None else parameters.get(layer) or {}
        bounds = [own.get("original_max_position_embeddings")]
        if "dynamic" in kind:
            bounds += [getattr(module, name, 0) for name in ("original_max_seq_len", "max_seq_len_cached")]
        known = kind == "longrope" or "dynamic" in kind
        limits.append(min((int(bound) for bound in bounds if bound is not None), default=0) if known else 0)
    return min(limits)


def _settle(module: Any) -> None:
    """Let a rotary module forget what it has seen: transformers keeps the first frequencies beside the latest."""
    for name, value in _values(module).items():
        if name.endswith("original_inv_freq"):
            module._buffers[name.replace("original_", "")] = _copy(value)
        elif name.endswith("max_seq_len_cached") and hasattr(module, "original_max_seq_len"):
            setattr(module, name, module.original_max_seq_len)


def _values(module: nn.Module) -> dict[str, Any]:
    """What a module keeps of a sequence: numbers and tensors, by name."""
    attributes = vars(module)
    if OFFSET in attributes:
        return {OFFSET: attributes[OFFSET]}
    numbers = {
        name: value
        for name, value in attributes.items()
        if type(value) in (int, float) or isinstance(value, torch.Tensor)
    }
    return {**numbers, **{name: buffer for name, buffer in module._buffers.items() if buffer is not None}}


def _copy(value: Any) -> Any:
    """A value that nobody else writes to: transformers changes frequencies in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


class _Filled(DynamicCache):  # type: ignore[misc]
    """A cache that reports a number of tokens and holds none."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def __len__(self) -> int:
        return 1

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self._tokens


def _rereads(model: Any, limit: int) -> bool:
    """Whether a model gives up its cache where a sequence grows beyond the limit, when it prepares a call."""
    if limit == 0 or not hasattr(model, "prepare_inputs_for_generation"):
        return False
    names = inspect.signature(model.prepare_inputs_for_generation).parameters
    cache, ids = _Filled(limit), torch.zeros(1, limit + 1, dtype=torch.long)
    given = {"cache" if "cache" in names else "past_key_values": cache, "attention_mask": torch.ones_like(ids)}
    try:
        prepared = model.prepare_inputs_for_generation(ids, **given, use_cache=True)
    except Exception:  # whatever a class makes of a call that is not quite that of `generate`
        return False
    return not any(value is cache for value in prepared.values())

"""State that a model derives from a sequence and keeps in its modules. It must not leak into the next sequence.

Some kinds of rotary frequencies depend on the sequence length (`dynamic`, `longrope`, PhiMoE's factors), and their
modules keep what they computed. A `dynamic` module keeps the frequencies of the longest sequence so far and would
apply them to a later, shorter sequence. Vision-language models keep the offset between positions and token indices.

`Carried` resets these modules to their state in a freshly loaded model. Installed as a hook, it does so whenever a call
begins a sequence, for every caller. After that, frequencies follow from the largest position of a call.

Up to `limit` tokens, the frequencies are the same for all lengths. Such sequences may share a forward pass and the keys
and values of a common prefix. Longer sequences may not.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache

__all__ = ["Carried", "carried_of"]

CONSTANT = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Kinds of rotary positions that do not depend on the length; all other kinds are assumed to depend on it."""

OFFSET = "rope_deltas"
"""The attribute in which vision-language models keep the offset between positions and token indices."""


class Carried:
    """The per-sequence state kept by a model.

    Attributes:
        limit: the largest number of tokens for which frequencies do not depend on the length; None if unbounded.
        rereads: whether the model's own generation re-encodes a sequence when it grows past the limit.

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
        """Whether the model keeps any state."""
        return bool(self._fresh)

    def depends_on(self, length: int) -> bool:
        """Whether the frequencies of a sequence depend on its length, in tokens."""
        return self.limit is not None and length > self.limit

    def reset(self) -> None:
        """Restore the state from before the first sequence."""
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
        """Reset if the call begins a sequence; used as a forward pre-hook."""
        if torch.compiler.is_compiling():
            return
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        if cache is None or cache.get_seq_length() == 0:
            self.reset()


def carried_of(model: Any) -> Carried:
    """Return the model's per-sequence state and install the hook that resets it; repeated calls return one object."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, Carried):
            return hook
    carried = Carried(model)
    if carried:
        model.register_forward_pre_hook(carried, with_kwargs=True)
    return carried


def _decoder(model: Any) -> nn.Module:
    """The text decoder: rotary positions of vision towers are places in an image."""
    try:
        found = model.get_decoder()
    except AttributeError:
        return model  # type: ignore[no-any-return]
    return found if isinstance(found, nn.Module) else model


def _kinds(module: Any) -> dict[str | None, str]:
    """The kinds of rotary positions that a module computes, by layer type."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return {None: kinds}
    return {layer: kind for layer, kind in kinds.items() if isinstance(kind, str)} if isinstance(kinds, Mapping) else {}


def _limit(module: Any) -> int:
    """The longest sequence with the same frequencies as a single token; 0 if the module does not specify it."""
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
    """Make a rotary module forget past sequences: transformers keeps the original frequencies beside the latest."""
    for name, value in _values(module).items():
        if name.endswith("original_inv_freq"):
            module._buffers[name.replace("original_", "")] = _copy(value)
        elif name.endswith("max_seq_len_cached") and hasattr(module, "original_max_seq_len"):
            setattr(module, name, module.original_max_seq_len)


def _values(module: nn.Module) -> dict[str, Any]:
    """The per-sequence state of a module: numbers and tensors, by name."""
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
    """An unshared copy of a value: transformers modifies frequencies in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


class _Filled(DynamicCache):  # type: ignore[misc]
    """A cache that reports a given number of tokens but holds none."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def __len__(self) -> int:
        return 1

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self._tokens


def _rereads(model: Any, limit: int) -> bool:
    """Whether the model drops its cache in `prepare_inputs_for_generation` when a sequence grows past the limit."""
    if limit == 0 or not hasattr(model, "prepare_inputs_for_generation"):
        return False
    names = inspect.signature(model.prepare_inputs_for_generation).parameters
    cache, ids = _Filled(limit), torch.zeros(1, limit + 1, dtype=torch.long)
    given = {"cache" if "cache" in names else "past_key_values": cache, "attention_mask": torch.ones_like(ids)}
    try:
        prepared = model.prepare_inputs_for_generation(ids, **given, use_cache=True)
    except Exception:  # classes may raise anything on a call that differs slightly from that of `generate`
        return False
    return not any(value is cache for value in prepared.values())

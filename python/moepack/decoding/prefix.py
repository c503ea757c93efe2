"""Keeps keys and values for a prompt with the same beginning, such as the next turn of a chat."""

import copy
import math
import sys
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from moepack.decoding.cache import GrowingLayer
from moepack.decoding.narrow import NarrowLayer, NarrowWindow

__all__ = ["Prefix", "common", "forked", "kv_bits", "new_cache", "set_kv_bits"]


KV_BITS = (8,)
"""The numbers of bits in which keys and values can be stored, besides those of the model's dtype."""


def set_kv_bits(model: Any, bits: int | None) -> None:
    """Store keys and values of new caches of a model in 8 bits, or in the model's dtype if `bits` is None.

    Raises:
        ValueError: another number of bits, or a model that keeps its state in other layers.
    """
    if bits is not None and bits not in KV_BITS:
        raise ValueError(f"kv_bits must be {' or '.join(map(str, KV_BITS))}, not {bits!r}")
    if bits is not None and model.config.is_encoder_decoder:
        raise ValueError("kv_bits needs a decoder-only model")
    model.moepack_kv_bits = bits
    cache = new_cache(model)
    if bits is not None and not any(isinstance(layer, (NarrowLayer, NarrowWindow)) for layer in cache.layers):
        model.moepack_kv_bits = None
        raise ValueError(f"kv_bits: {type(model).__name__} has a cache of its own, which is not stored in 8 bits")


def kv_bits(model: Any) -> int | None:
    """Return the number of bits in which new caches of a model store keys and values; None for the model's dtype."""
    bits: int | None = getattr(model, "moepack_kv_bits", None)
    return bits


def new_cache(model: Any) -> Any:
    """Return an empty cache for one sequence; layers that keep all tokens grow in place.

    A model whose transformers file defines its own cache class (MiniMax) gets that class. `set_kv_bits` selects layers
    in 8 bits; states of linear attention keep their dtypes.
    """
    classes = vars(sys.modules[type(model).__module__]).values()
    own = [kind for kind in classes if isinstance(kind, type) and issubclass(kind, DynamicCache)]
    if (kind := next((kind for kind in own if kind.__module__ == type(model).__module__), None)) is not None:
        return kind()
    cache = DynamicCache(config=model.config)
    kinds: dict[type, Any] = {DynamicLayer: GrowingLayer}
    if kv_bits(model) is not None:
        kinds = {DynamicLayer: NarrowLayer, DynamicSlidingWindowLayer: NarrowWindow}
    cache.layers = [kinds[type(layer)].of(layer) if type(layer) in kinds else layer for layer in cache.layers]
    return cache


def forked(cache: Any) -> Any:
    """Return a copy of a cache for another sequence that continues the same tokens."""
    return copy.deepcopy(cache)


def common(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


class Prefix:
    """The keys and values of a finished sequence.

    Args:
        ids: its tokens.
        cache: a cache from `new_cache`, filled by the model.
        limit: the most tokens of a sequence that may share them (`moepack.decoding.carried`), because keys of longer
            sequences are rotated by other angles; None for no limit.
        adapter: the adapter that computed them; None for the model itself.
    """

    def __init__(self, ids: list[int], cache: Any, limit: int | None = None, adapter: str | None = None) -> None:
        self.ids = ids
        self.adapter = adapter
        self.cache = cache
        self.limit = math.inf if limit is None else limit

    @property
    def is_useful(self) -> bool:
        """Whether the cache can be cropped and reused for other sequences.

        A sliding window has dropped tokens that a shorter sequence attends to.
        """
        return len(self.ids) <= self.limit and all(isinstance(layer, GrowingLayer) for layer in self.cache.layers)

    def shared(self, ids: list[int], adapter: str | None = None) -> int:
        """Return how many prompt tokens can be reused; the last one never is, because its logits are needed."""
        if adapter != self.adapter or len(ids) > self.limit:
            return 0
        return min(common(self.ids, ids), len(ids) - 1)

    def continued(self, ids: list[int]) -> Any:
        """Return the cache, cropped to the common prefix with a prompt."""
        surplus = self.cache.get_seq_length() - self.shared(ids, self.adapter)
        if surplus:
            self.cache.crop(-surplus)
        return self.cache

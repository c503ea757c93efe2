"""Keys and values that are kept for a prompt that begins with the same tokens, such as the next turn of a chat."""

from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer

from moepack.runtime.cache import GrowingLayer

__all__ = ["Prefix", "common", "new_cache"]


def new_cache(model: Any) -> Any:
    """Return an empty cache for one sequence of a model, whose layers grow in place where they keep all tokens."""
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer.of(layer) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def common(first: list[int], second: list[int]) -> int:
    """Return how many tokens two sequences begin with alike."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


class Prefix:
    """The keys and values of a sequence that has ended.

    Args:
        ids: the tokens that they are of.
        cache: what `new_cache` made and the model has filled.
    """

    def __init__(self, ids: list[int], cache: Any) -> None:
        self.ids = ids
        self.cache = cache

    @property
    def is_useful(self) -> bool:
        """Whether the cache can be cropped: a window has dropped tokens that a shorter sequence sees."""
        return all(type(layer) is GrowingLayer for layer in self.cache.layers)

    def shared(self, ids: list[int]) -> int:
        """Return how many tokens of a prompt need not be read again; its last one always is, for what comes next."""
        return min(common(self.ids, ids), len(ids) - 1)

    def continued(self, ids: list[int]) -> Any:
        """Return the cache, cropped to what it shares with a prompt."""
        surplus = self.cache.get_seq_length() - self.shared(ids)
        if surplus:
            self.cache.crop(-surplus)
        return self.cache

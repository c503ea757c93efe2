"""Sizes of weight files apart from packed tensors."""

from collections.abc import Collection

from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.balanced import BalancedCheckpoint

__all__ = ["kept_bytes"]

TENSOR_HEADER, SHARD_HEADER = 90, 112
"""Header bytes of a shard: per tensor, excluding its name, and per file, including padding."""


def kept_bytes(checkpoint: Checkpoint, model: MoeModel, packed: Collection[str]) -> int:
    """Return the bytes of all safetensors files without packed tensors, to within the padding of headers.

    Args:
        checkpoint: the source.
        model: its description.
        packed: names of the packed tensors, experts and linear layers.
    """
    kept = set(model.dense_names) - set(packed)
    headers = sum(TENSOR_HEADER + len(name) for name in kept | set(packed))
    factors = checkpoint.form.nbytes if isinstance(checkpoint, BalancedCheckpoint) else 0
    shards = factors + SHARD_HEADER * (1 + len(model.layers) + len(model.dense))
    return shards + headers + sum(checkpoint.info(name).nbytes for name in kept)

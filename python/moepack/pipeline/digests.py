"""Digests of the inputs of finished shards, so that finished work survives the repair of a checkpoint.

A NaN weight may end a job after hours of work, and repairing it changes the model's fingerprint. The finished shards
are still valid if their own inputs are unchanged. A job that fails because of its checkpoint therefore records digests
of these inputs in its journal, and the next run keeps the shards with equal digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache

from moepack.calibration.stage import layer_tensors
from moepack.checkpoint import Checkpoint
from moepack.checkpoint.dense import position
from moepack.pipeline.assignment import PlannedAssignment
from moepack.pipeline.outputs import Outputs, Shard

__all__ = ["Digests"]


class Digests:
    """Computes digests of the inputs of each shard of a job."""

    def __init__(self, checkpoint: Checkpoint, outputs: Outputs, planned: PlannedAssignment) -> None:
        self.checkpoint, self.outputs, self.planned = checkpoint, outputs, planned
        self._digest = cache(self._tensor_digest)

    def of(self, files: Iterable[str]) -> dict[str, str]:
        """Return the SHA-256 (hexadecimal) of the inputs of each planned shard in `files`.

        Reads all tensors involved.
        """
        wanted = set(files)
        return {shard.file: self._shard_digest(shard) for shard in self.outputs.shards if shard.file in wanted}

    def _shard_digest(self, shard: Shard) -> str:
        tensors = [] if shard.layer is None else layer_tensors(shard.layer).values()
        decided = [self.planned.decided(weights) for weights in tensors]
        digest = hashlib.sha256(json.dumps([self.checkpoint.config, decided], sort_keys=True).encode())
        for name in sorted(self._tensors(shard)):
            digest.update(f"{name} {self._digest(name)}\n".encode())
        return digest.hexdigest()

    def _tensor_digest(self, name: str) -> str:
        info = self.checkpoint.info(name)
        return f"{info.dtype} {info.shape} {hashlib.sha256(self.checkpoint.raw(name).data).hexdigest()}"

    def _tensors(self, shard: Shard) -> set[str]:
        """Return the checkpoint's tensors that determine a shard's bytes, or a superset of them.

        Without calibration, a layer depends on its own sources and on decisions made in advance. With calibration, it
        also depends on everything that runs before it: embeddings, routers, norms and layers up to this one, but not on
        what follows it in its block or in later blocks.
        """
        if shard.layer is None:
            return set(shard.names)
        if self.planned.request is None:
            return _sources(shard)
        place = position(shard.layer.name)
        packed = [each for each in self.outputs.shards if each.layer is not None]
        later = [_sources(each) for each in packed[packed.index(shard) + 1 :]]
        return {name for name in self.checkpoint.names() if position(name) <= place}.difference(*later)


def _sources(shard: Shard) -> set[str]:
    """Return the names of the checkpoint's tensors that a layer packs."""
    assert shard.layer is not None
    return {source for weights in layer_tensors(shard.layer).values() for source in weights.sources}

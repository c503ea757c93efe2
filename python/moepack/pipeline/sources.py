"""What the finished shards of a job were made of, so that work outlives the repair of its checkpoint.

A weight that is NaN ends a job after hours of work, and mending it changes the fingerprint of the model. The finished
shards are still right if nothing that they follow from was changed. So a job that fails by its checkpoint leaves
digests of all that in its journal, and the next run keeps the shards whose digests are the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache

from moepack.calibration.stage import layer_tensors
from moepack.checkpoint import Checkpoint
from moepack.checkpoint.dense import position
from moepack.pipeline.plan import Plan, Shard

__all__ = ["Sources"]


class Sources:
    """Digests of what each shard of a plan is made of."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan) -> None:
        self.checkpoint, self.plan = checkpoint, plan
        self._digest = cache(self._tensor_digest)

    def digests(self, files: Iterable[str]) -> dict[str, str]:
        """SHA-256 in hexadecimal by shard, for those of `files` that the plan has; reads all tensors concerned."""
        wanted = set(files)
        return {shard.file: self._shard_digest(shard) for shard in self.plan.shards if shard.file in wanted}

    def _shard_digest(self, shard: Shard) -> str:
        tensors = [] if shard.layer is None else layer_tensors(shard.layer).values()
        decided = [self.plan.assignment.decided(weights) for weights in tensors]
        digest = hashlib.sha256(json.dumps([self.checkpoint.config, decided], sort_keys=True).encode())
        for name in sorted(self._tensors(shard)):
            digest.update(f"{name} {self._digest(name)}\n".encode())
        return digest.hexdigest()

    def _tensor_digest(self, name: str) -> str:
        info = self.checkpoint.info(name)
        return f"{info.dtype} {info.shape} {hashlib.sha256(self.checkpoint.raw(name).data).hexdigest()}"

    def _tensors(self, shard: Shard) -> set[str]:
        """The checkpoint's tensors that a shard's bytes follow from, or more.

        Without calibration a layer follows from its own sources, and from what was decided in advance. With calibration
        all that ran before counts too: embeddings, routers, norms and layers up to this one, but not what comes after
        it in its block or lies in later blocks.
        """
        if shard.layer is None:
            return set(shard.names)
        if self.plan.assignment.request is None:
            return _sources(shard)
        place = position(shard.layer.name)
        packed = [each for each in self.plan.shards if each.layer is not None]
        later = [_sources(each) for each in packed[packed.index(shard) + 1 :]]
        return {name for name in self.checkpoint.names() if position(name) <= place}.difference(*later)


def _sources(shard: Shard) -> set[str]:
    """The checkpoint's tensors that a layer packs."""
    assert shard.layer is not None
    return {source for weights in layer_tensors(shard.layer).values() for source in weights.sources}

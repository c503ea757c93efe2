"""Finds experts of layers that transformers' model does not have, for multi-token prediction.

DeepSeek-V3 and GLM-4.5 store such a layer after the last one, Qwen3-Next and MiMo under `mtp`. All of them store one
tensor per matrix per expert. No transformers model runs these experts, so they are found by name only and packed
without calibration. Experts with other names are not packed.

Invariant: the tensors of such experts are among those that `describe` reports as dense.
"""

import re
from collections.abc import Iterable, Iterator

from moepack.checkpoint.architectures.common import GATE_UP_DOWN
from moepack.checkpoint.dense import FLOATS, position
from moepack.checkpoint.model import MoeLayer, Part, Projection
from moepack.checkpoint.reader import Checkpoint

__all__ = ["LAYOUT", "find_beyond"]

LAYOUT = GATE_UP_DOWN
"""The layout of such experts."""

_EXPERT = re.compile(r"(?P<block>.+)\.experts\.(?P<number>\d+)\.(?:gate|up|down)_proj\.weight")


def find_beyond(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[MoeLayer]:
    """Find complete experts among tensors that the model does not need.

    Args:
        checkpoint: the checkpoint.
        names: tensor names, without those of the model's own experts.
    """
    experts: dict[str, set[int]] = {}
    for name in names:
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match["block"], set()).add(int(match["number"]))
    for block in sorted(experts, key=position):
        if (layer := _layer(checkpoint, block, len(experts[block]))) is not None:
            yield layer


def _layer(checkpoint: Checkpoint, block: str, count: int) -> MoeLayer | None:
    """Return the experts 0 to `count` - 1 of a block; None if a matrix is missing or shapes differ."""
    projections = []
    for template, (name,) in LAYOUT.tensors.items():
        sources = [f"{block}.{template.format(expert)}" for expert in range(count)]
        if any(source not in checkpoint for source in sources):
            return None
        infos = [checkpoint.info(source) for source in sources]
        shapes = {info.shape for info in infos}
        if len(shapes) > 1 or len(infos[0].shape) != 2 or any(info.dtype not in FLOATS for info in infos):
            return None
        shape = (count, *infos[0].shape)
        parts = tuple(map(Part, sources))
        projections.append(Projection(name, shape, f"{block}.experts.{name}", parts, checkpoint))
    return MoeLayer(f"{block}.experts", tuple(projections), (), ())

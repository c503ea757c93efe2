"""Finds the seams of a checkpoint: places where a factor can move from one tensor to another without any effect.

| seam | multiplied | divided |
|---|---|---|
| norm | its gain, and its offset if it has one | columns of all matrices that read its output |
| channels | rows of the up projection, or of the matrix in front of a ReLU | columns of the down projection |
| values | rows of the value projection, and its bias | columns of the output projection |

A seam is found only if all tensors involved are known and the matrices whose columns are balanced will be packed. All
other tensors keep their scales. So does the last norm of a checkpoint with layers for multi-token prediction, which
read its output and share the head.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moepack.checkpoint.architectures import ARCHITECTURES, Architecture, Linears
from moepack.checkpoint.architectures.pre_normed import MODEL_TYPES, PRE_NORMED
from moepack.checkpoint.model import MoeLayer, MoeModel, Part
from moepack.checkpoint.reader import Checkpoint

__all__ = ["Edge", "Heads", "Seam", "find_seams", "knows_norms"]

_PREDICTION = re.compile(r"(?:.+\.)?mtp\w*\..+|.+\.eh_proj\.weight")
"""Names of tensors for multi-token prediction: of Qwen3-Next, MiMo and Ernie 4.5, and of DeepSeek-V3 and GLM-4.5."""


@dataclass(frozen=True, slots=True)
class Heads:
    """How the features of a seam lie on an axis that is divided into heads.

    Attributes:
        count: heads of the seam.
        shared: adjacent heads of the axis that share the features of one head of the seam.
        before: other entries of the axis at the start of each head.
    """

    count: int
    shared: int = 1
    before: int = 0

    def spread(self, factors: Tensor) -> Tensor:
        """Return the factors of the axis from those of the seam; 1 for other entries."""
        heads = factors.view(self.count, 1, -1).expand(-1, self.shared, -1)
        padded = factors.new_ones(self.count, self.shared, self.before + heads.shape[2])
        padded[..., self.before :] = heads
        return padded.flatten()

    def features(self, matrix: Tensor) -> Tensor:
        """Return a matrix [N, axis] as rows over the features of the seam, [N * shared, features]."""
        heads = matrix.reshape(len(matrix), self.count, self.shared, -1)[..., self.before :]
        return heads.transpose(1, 2).reshape(len(matrix) * self.shared, -1)


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor at a seam.

    Attributes:
        part: the place of the matrix or vector.
        heads: how features lie on the axis; None if they are the axis.
    """

    part: Part
    heads: Heads | None = None

    def spread(self, factors: Tensor) -> Tensor:
        """Return the factors of the axis from those of the seam."""
        return factors if self.heads is None else self.heads.spread(factors)

    def features(self, matrix: Tensor) -> Tensor:
        """Return a matrix [N, axis] as rows over the features of the seam."""
        return matrix if self.heads is None else self.heads.features(matrix)


@dataclass(frozen=True, slots=True)
class Seam:
    """A seam.

    Attributes:
        name: a unique name.
        vectors: vectors that are multiplied, the gain of a norm first.
        writes: matrices whose rows are multiplied.
        reads: matrices whose columns are divided.
        measured: those of `reads` whose columns are balanced: all but routers and gates, packed or not, so that a
            norm's factors do not depend on what else is packed.
    """

    name: str
    vectors: tuple[Edge, ...]
    writes: tuple[Edge, ...]
    reads: tuple[Edge, ...]
    measured: tuple[Edge, ...]

    @property
    def tensors(self) -> set[str]:
        """The names of all tensors at the seam."""
        return {edge.part.tensor for edge in (*self.vectors, *self.writes, *self.reads)}


def find_seams(checkpoint: Checkpoint, model: MoeModel, packed: Collection[str]) -> tuple[Seam, ...]:
    """Return the seams of a checkpoint. No tensor is read.

    Args:
        checkpoint: the checkpoint.
        model: its description.
        packed: names of the tensors that will be packed in a format without factors of columns.
    """
    found = [seam for layer in model.layers for seam in _experts(checkpoint, layer, packed)]
    architecture = _described(model.architecture)
    if architecture is not None:
        experts = {source for layer in model.layers for part in layer.projections for source in part.sources}
        measured = experts | {linear.source for layer in model.dense for linear in layer.linears}
        norms = (*_norms(checkpoint, architecture), *_norms_across(checkpoint, architecture))
        for norm, readers in norms:
            found += _norm(checkpoint, norm, readers, measured, packed)
        for role, linears in architecture.dense.items():
            found += _linears(checkpoint, architecture, linears, role, packed)
    return tuple(found)


def knows_norms(model_type: str) -> bool:
    """Return whether it is known what reads the norms of an architecture."""
    return _described(model_type) is not None


def _described(model_type: str) -> Architecture | None:
    return ARCHITECTURES.get(model_type, PRE_NORMED if model_type in MODEL_TYPES else None)


def _experts(checkpoint: Checkpoint, layer: MoeLayer, packed: Collection[str]) -> Iterator[Seam]:
    """Yield the channels of each expert of a layer."""
    *first, down = layer.projections
    if not first or not {*first[-1].sources, *down.sources} <= set(packed) or 0 in down.shape:
        return
    if layer.kind != "gated" and not (layer.kind == "plain" and _is_relu(checkpoint.config)):
        return
    for expert, (up, read) in enumerate(zip(first[-1].parts, down.parts, strict=True)):
        yield _matched(f"{layer.name}.{expert}", Edge(up), Edge(read))


def _matched(name: str, write: Edge, read: Edge, vectors: tuple[Edge, ...] = ()) -> Seam:
    """Return the seam between two packed matrices."""
    return Seam(name, vectors, (write,), (read,), (read,))


def _is_relu(config: dict[str, Any]) -> bool:
    """Return whether the function between two matrices without a gate is ReLU, which lets positive factors pass."""
    return (
        config.get("model_type") == "switch_transformers"
        and config.get("dense_act_fn", config.get("feed_forward_proj", "relu")) == "relu"
    )


def _norms(checkpoint: Checkpoint, architecture: Architecture) -> Iterator[tuple[str, list[str]]]:
    """Yield norms with their readers: those within layers that hold only known matrices, and the last norm."""
    readers = {norm: re.compile("|".join(names)) for norm, names in _readers(architecture).items()}
    others = re.compile("|".join(_other_matrices(architecture)))
    pattern = re.compile(rf"{architecture.place or f'(?P<place>{architecture.layer})'}\.(?P<rest>.+)")
    places: dict[str, list[str]] = {}
    for name in checkpoint.names():
        if (match := pattern.fullmatch(name)) and len(checkpoint.info(name).shape) > 1:
            places.setdefault(match["place"], []).append(match["rest"])
    for place, rests in places.items():
        if all(others.fullmatch(rest) or any(p.fullmatch(rest) for p in readers.values()) for rest in rests):
            for norm, reads in readers.items():
                yield f"{place}.{norm}", [f"{place}.{rest}" for rest in rests if reads.fullmatch(rest)]
    if architecture.head in checkpoint and not any(map(_PREDICTION.fullmatch, checkpoint.names())):
        yield architecture.last_norm.removesuffix(".weight"), [architecture.head]


def _norms_across(checkpoint: Checkpoint, architecture: Architecture) -> Iterator[tuple[str, list[str]]]:
    for norm, names in architecture.readers_across.items():
        yield norm, [name for name in checkpoint.names() if re.fullmatch(names, name)]


def _norm(
    checkpoint: Checkpoint, norm: str, readers: list[str], measured: Collection[str], packed: Collection[str]
) -> Iterator[Seam]:
    """Yield the seam of a norm if its gain exists, fits all readers, and one of them is packed."""
    gain, offset = f"{norm}.weight", f"{norm}.bias"
    if gain not in checkpoint or not any(name in packed for name in readers):
        return
    (size,) = checkpoint.info(gain).shape if len(checkpoint.info(gain).shape) == 1 else (0,)
    if not size or any(checkpoint.info(name).shape[-1] != size for name in readers):
        return
    vectors = tuple(Edge(Part(name)) for name in (gain, offset) if name in checkpoint)
    edges = [(name, edge) for name in readers for edge in _edges(checkpoint, name)]
    balanced = tuple(edge for name, edge in edges if name in measured)
    yield Seam(norm, vectors, (), tuple(edge for _, edge in edges), balanced)


def _edges(checkpoint: Checkpoint, name: str) -> Iterator[Edge]:
    """Yield the matrices of a tensor, which may stack them."""
    shape = checkpoint.info(name).shape
    yield from (Edge(Part(name, (i,))) for i in range(shape[0])) if len(shape) == 3 else (Edge(Part(name)),)


def _readers(architecture: Architecture) -> dict[str, list[str]]:
    """Return the patterns of the matrices that read each norm, by the norm's path, both below the layer."""
    if architecture.readers is not None:
        return {norm: list(names) for norm, names in architecture.readers.items()}
    routers = [rf"{re.escape(name)}(?:\w+\.)*weight" for name in architecture.router]
    gates = [rf"{re.escape(name)}weight" for name in architecture.shared if name.endswith("_gate.")]
    experts = [_escaped(name) for layout in architecture.layouts for name in list(layout.tensors)[:-1]]
    found = {architecture.norm: [rf"{architecture.block}\.{name}" for name in (*routers, *gates, *experts)]}
    for linears in architecture.dense.values():
        found.setdefault(linears.norm, []).extend(rf"{linears.path}\.{name}\.weight" for name in linears.reads)
        for norm, name in linears.latent.items():
            found[f"{linears.path}.{norm}"] = [rf"{linears.path}\.{name}\.weight"]
    return found


def _other_matrices(architecture: Architecture) -> Iterator[str]:
    """Yield the patterns of the matrices that read no norm, below the place."""
    if architecture.place is not None:
        yield r".*\.(?:o|wo|k|v|relative_attention_bias)\.weight"
    for linears in architecture.dense.values():
        yield from (rf"{linears.path}\.{name}\.weight" for name in linears.writes)
    for layout in architecture.layouts:
        yield rf"{architecture.block}\.{_escaped(list(layout.tensors)[-1])}"


def _escaped(template: str) -> str:
    return re.escape(template).replace(r"\{\}", r"\d+")


def _linears(
    checkpoint: Checkpoint, architecture: Architecture, linears: Linears, role: str, packed: Collection[str]
) -> Iterator[Seam]:
    """Yield the values of attention, or the channels of feed-forward layers outside the experts."""
    pair = linears.values or linears.channels
    if not pair or (linears.values and checkpoint.config.get("clip_qkv") is not None):
        return
    if linears.channels and role == "mlp" and "wi" in pair and not _is_relu(checkpoint.config):
        return
    write, read = pair
    pattern = re.compile(rf"(?P<path>{architecture.layer}\.{linears.path})\.{write}\.weight")
    for name in checkpoint.names():
        match = pattern.fullmatch(name)
        if match is None or name not in packed or (other := f"{match['path']}.{read}.weight") not in packed:
            continue
        shapes = checkpoint.info(name).shape, checkpoint.info(other).shape
        heads = _heads(checkpoint.config, *shapes, latent=bool(linears.latent)) if linears.values else (None, None)
        if heads is None or (heads == (None, None) and shapes[0][0] != shapes[1][1]):
            continue
        bias = f"{match['path']}.{write}.bias"
        vectors = (Edge(Part(bias), heads[0]),) if bias in checkpoint else ()
        yield _matched(name, Edge(Part(name), heads[0]), Edge(Part(other), heads[1]), vectors)


def _heads(
    config: dict[str, Any], write: tuple[int, ...], read: tuple[int, ...], latent: bool
) -> tuple[Heads, Heads] | None:
    """Return how values lie on the rows of their projection and the columns of the output; None if they do not fit."""
    count = config.get("num_heads") or config.get("num_attention_heads")
    before = config.get("qk_nope_head_dim") if latent else 0
    if not isinstance(count, int) or not isinstance(before, int) or read[1] % count:
        return None
    for own in (config.get("num_key_value_heads"), count):
        if isinstance(own, int) and own and count % own == 0 and write[0] == own * (before + read[1] // count):
            return Heads(own, before=before), Heads(own, shared=count // own)
    return None

"""Folds a rotation of the residual stream into a checkpoint, so that no rotation runs online (CodeQuant, figure 2).

Every state h becomes h R. RMS norms are invariant once their weights are moved into the following layers, which become
W diag(gamma) R. Layers that write to the stream (output and down projections) become R^T W, embeddings E R. The router
reads the stream like any other layer. A head that is tied to the embeddings is untied, because it absorbs the last
norm.

Norms of queries, keys and latents follow a projection and stay unchanged; so do biases of layers that read the stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moepack.checkpoint import Checkpoint
from moepack.checkpoint.architectures import ARCHITECTURES, Architecture, described
from moepack.errors import InvalidTensorError, UnsupportedModelError
from moepack.methods.codequant.rotation.cayley import is_orthogonal

__all__ = ["Folding", "Stream", "check", "fold"]


class Stream:
    """The role of each tensor of an architecture in the residual stream, by name.

    Attributes:
        architecture: its description; the tensors at both ends of the stream match none of the patterns.
        norms: norms in front of layers that read the stream.
        reads: the weights behind each norm.
        writes: weights whose outputs are added to the stream.
        biases: biases of these weights.
        stays: tensors that do not touch the stream.
    """

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        layouts = [[_expert_name(name) for name in layout.tensors] for layout in architecture.layouts]
        block = [
            *(f"{re.escape(name)}weight" for name in architecture.router),
            *(n for names in layouts for n in names[:-1]),
        ]
        reads = {architecture.norm: [rf"{architecture.block}\.{name}" for name in block]}
        writes = [rf"{architecture.block}\.{names[-1]}" for names in layouts]
        biases, stays = [], []
        for linears in architecture.dense.values():
            reads.setdefault(linears.norm, []).extend(rf"{linears.path}\.{name}\.weight" for name in linears.reads)
            writes += [rf"{linears.path}\.{name}\.weight" for name in linears.writes]
            biases += [rf"{linears.path}\.{name}\.bias" for name in linears.writes]
            stays += [rf"{linears.path}\.{name}\.weight" for name in linears.inner]
            stays += [rf"{linears.path}\.{name}" for name in linears.others]
        self.norms = self._pattern(rf"{norm}\.weight" for norm in reads)
        self.reads = {norm: self._pattern(names) for norm, names in reads.items()}
        self.writes, self.biases, self.stays = map(self._pattern, (writes, biases, stays))

    def _pattern(self, names: Iterable[str]) -> re.Pattern[str]:
        return re.compile(rf"{self.architecture.layer}\.(?:{'|'.join(names)})")

    def knows(self, name: str) -> bool:
        """Return whether a tensor's role is known."""
        ends = (self.architecture.embeddings, self.architecture.head, self.architecture.last_norm)
        patterns = (self.norms, *self.reads.values(), self.writes, self.biases, self.stays)
        return name in ends or any(pattern.fullmatch(name) for pattern in patterns)

    def norm_before(self, name: str) -> str:
        """Return the name of the norm weights in front of a tensor that reads the stream."""
        if name == self.architecture.head:
            return self.architecture.last_norm
        return next(
            f"{match['layer']}.{norm}.weight" for norm, reads in self.reads.items() if (match := reads.fullmatch(name))
        )


def _expert_name(template: str) -> str:
    return re.escape(template).replace(r"\{\}", r"\d+")


@dataclass(frozen=True)
class Folding:
    """A checkpoint with a folded rotation, computed tensor by tensor.

    Attributes:
        stream: the roles of its tensors in the residual stream.
        rotation: [H, H] float32, or None to keep all tensors.
        names: the tensors.
        config: changes to config.json.
    """

    checkpoint: Checkpoint
    stream: Stream
    rotation: Tensor | None
    names: tuple[str, ...]
    config: Mapping[str, Any]

    def source(self, name: str) -> str:
        """Return the checkpoint tensor that a tensor is computed from; a tied head is computed from the embeddings."""
        ends = self.stream.architecture
        return ends.embeddings if name == ends.head and name not in self.checkpoint else name

    def tensor(self, name: str) -> Tensor:
        """Return a tensor with the rotation folded in, in float32, or an unaffected tensor in the checkpoint's dtype.

        Raises:
            InvalidTensorError: it holds NaN or infinity, or overflows.
            CheckpointError: the file changed since the checkpoint was opened.
        """
        source = self.source(name)
        given = self.checkpoint.tensor(source)
        if self.rotation is None:
            return given
        if name == self.stream.architecture.last_norm or self.stream.norms.fullmatch(name):
            return torch.ones_like(given)
        if self.stream.stays.fullmatch(name):
            return given
        folded = self._folded(name, given.float(), self.rotation)
        if not bool(folded.isfinite().all()):
            raise InvalidTensorError("holds NaN or infinite values, or overflows once it is rotated", tensor=source)
        return folded

    def _folded(self, name: str, values: Tensor, rotation: Tensor) -> Tensor:
        if name == self.stream.architecture.embeddings or self.stream.biases.fullmatch(name):
            return values @ rotation
        if self.stream.writes.fullmatch(name):
            return rotation.T @ values
        return (values * self.checkpoint.tensor(self.stream.norm_before(name)).float()) @ rotation


def check(checkpoint: Checkpoint) -> Stream:
    """Return the stream roles of a checkpoint's tensors, or reject a checkpoint that cannot be rotated.

    Raises:
        UnsupportedModelError: another architecture, or a tensor whose role in the stream is unknown.
    """
    kind = checkpoint.config["model_type"]
    if not described(kind).rotatable:
        known = ", ".join(name for name, architecture in ARCHITECTURES.items() if architecture.rotatable)
        message = f"only {known} models can be rotated, not {kind}; use --rotation none"
        raise UnsupportedModelError(message, file=checkpoint.path)
    stream = Stream(described(kind))
    for name in checkpoint.names():
        if not stream.knows(name):
            message = "has no known role in a rotation; use --rotation none"
            raise UnsupportedModelError(message, file=checkpoint.info(name).file, tensor=name)
    return stream


def fold(checkpoint: Checkpoint, rotation: Tensor | None) -> Folding:
    """Fold a rotation into a checkpoint; tensors are computed lazily.

    Args:
        checkpoint: a checkpoint of a rotatable architecture.
        rotation: [H, H] float32, or None to keep all tensors.

    Raises:
        UnsupportedModelError: another architecture, or a tensor whose role in the stream is unknown.
        InvalidTensorError: the matrix is not orthogonal, or has the wrong size.
    """
    stream = check(checkpoint)
    if rotation is None:
        return Folding(checkpoint, stream, None, checkpoint.names(), {})
    embeddings, head = stream.architecture.embeddings, stream.architecture.head
    width = checkpoint.info(embeddings).shape[-1]
    if tuple(rotation.shape) != (width, width) or not is_orthogonal(rotation):
        raise InvalidTensorError(f"the rotation is not an orthogonal matrix with {width} columns", tensor="rotation")
    names = checkpoint.names()
    if head in checkpoint:
        return Folding(checkpoint, stream, rotation, names, {})
    return Folding(checkpoint, stream, rotation, (*names, head), {"tie_word_embeddings": False})

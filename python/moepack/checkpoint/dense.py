"""Finds the matrices outside the experts: attention, shared experts, dense feed-forward, output head, embedding.

They are found by name and shape: floating-point matrices called `weight` whose path has a role in the architecture's
description. Everything else is not packed: routers, gates of shared experts, norms, indexers, and the layers of
multi-token prediction. A head that is tied to the embedding is not listed, because the embedding's tensor serves both.

Invariants: layers are in the order of execution, the embedding first, attention before feed-forward; every source is
in `MoeModel.dense_names`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from moepack.checkpoint.architectures import EMBEDDING, ROLES, Architecture
from moepack.checkpoint.reader import Checkpoint

__all__ = ["EMBEDDING", "FLOATS", "ROLES", "DenseLayer", "DenseLinear", "find_dense", "position"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes that can be compressed."""


@dataclass(frozen=True)
class DenseLinear:
    """A linear layer y = x W^T + b, whose W can be packed and whose b cannot; or the token embedding.

    Attributes:
        name: path of the module in transformers' model, such as `model.layers.0.self_attn.q_proj`.
        role: one of `ROLES`, or `EMBEDDING`.
        shape: rows (outputs, or tokens) and columns (inputs, or features).
        source: name of the checkpoint's tensor. The packed tensor has the same name, so that transformers without
            moepack finds a wrong shape and fails.
        checkpoint: the checkpoint with the tensor.
    """

    name: str
    role: str
    shape: tuple[int, int]
    source: str
    checkpoint: Checkpoint

    def matrix(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the weights, shape (R, C), in the checkpoint's dtype, on a device or mapped.

        Raises:
            CheckpointError: the file changed after the checkpoint was opened.
        """
        value = self.checkpoint.tensor(self.source)
        return value if device is None else value.to(device)

    @cached_property
    def nbytes(self) -> int:
        """Size of the weights in the checkpoint, in bytes."""
        return self.checkpoint.stored_bytes(self.source)


@dataclass(frozen=True)
class DenseLayer:
    """The linear layers of one block of the model.

    Attributes:
        name: path of the block, such as `model.layers.0`, `lm_head` or `model.embed_tokens`.
        linears: the linear layers in the order of computation.
    """

    name: str
    linears: tuple[DenseLinear, ...]

    def only(self, roles: frozenset[str]) -> "DenseLayer":
        """Return the same block with only the linear layers of these roles."""
        return DenseLayer(self.name, tuple(linear for linear in self.linears if linear.role in roles))


def find_dense(
    checkpoint: Checkpoint, architecture: Architecture, layers: int, taken: frozenset[str], renamed: Mapping[str, str]
) -> tuple[DenseLayer, ...]:
    """Find the linear layers of a checkpoint. No tensor is read.

    Args:
        checkpoint: the checkpoint.
        architecture: its description.
        layers: number of layers of the model. Later layers are ignored.
        taken: tensors that belong to experts or routers.
        renamed: transformers' paths of the sparse blocks, by their paths on disk.
    """
    found: dict[str, list[DenseLinear]] = {}
    for source, role, layer in _matches(checkpoint, architecture, layers):
        info = checkpoint.info(source)
        if source in taken or len(info.shape) != 2 or info.dtype not in FLOATS:
            continue
        name = _module(source.removesuffix(".weight"), renamed)
        linear = DenseLinear(name, role, (info.shape[0], info.shape[1]), source, checkpoint)
        found.setdefault(layer, []).append(linear)
    ordered = sorted(found.items(), key=lambda item: position(item[0]))
    return tuple(DenseLayer(name, tuple(sorted(linears, key=_order))) for name, linears in ordered)


def position(path: str) -> tuple[int, int]:
    """Return a sort key for the order of execution: embedding, encoder, decoder, head, each by layer number."""
    stack = 2 if path.startswith("lm_head") else int(path.startswith("decoder."))
    number = re.search(r"\.(\d+)(?:\.|$)", path)
    return stack, int(number[1]) if number else -1


def _matches(checkpoint: Checkpoint, architecture: Architecture, layers: int) -> Iterator[tuple[str, str, str]]:
    """Yield name, role and block of every tensor whose name matches a linear layer."""
    patterns = {}
    for role, linears in architecture.dense.items():
        names = "|".join((*linears.reads, *linears.inner, *linears.writes))
        patterns[role] = re.compile(rf"{architecture.layer}\.{linears.path}\.(?:{names})\.weight")
    tied = checkpoint.config.get("tie_word_embeddings")
    for name in checkpoint.names():
        if name == architecture.head and not tied:
            yield name, "head", name.removesuffix(".weight")
        if name == architecture.embeddings and architecture.looks_up:
            yield name, EMBEDDING, name.removesuffix(".weight")
        for role, pattern in patterns.items():
            match = pattern.fullmatch(name)
            if match and int(match["number"]) < layers:
                yield name, role, match["layer"]
                break


def _module(path: str, renamed: Mapping[str, str]) -> str:
    """Return the path in transformers' model of the module at `path` on disk."""
    for old, new in renamed.items():
        if path.startswith(f"{old}."):
            return new + path.removeprefix(old)
    return path


def _order(linear: DenseLinear) -> int:
    """Return a sort key by role, attention first. The sort is stable, so a role keeps the checkpoint's order."""
    return (EMBEDDING, *ROLES).index(linear.role)

"""The linear layers outside the experts: attention, shared experts, dense feed-forward blocks, the output head.

They are found by name and by shape: a matrix of floating-point numbers called `weight`, below a component and with a
last name that transformers uses for a linear layer of that role. What is not on the list stays what it is: routers,
gates of shared experts, norms, embeddings (a table of relative positions is a matrix too), indexers, and the layers of
multi-token prediction. A head that is tied to the embeddings is no tensor of its own, so it is never among them.

Invariants: layers come in the order of execution, attention before feed-forward; every source is in
`MoeModel.dense_names`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from moepack.checkpoint.reader import Checkpoint

__all__ = ["ROLES", "DenseLayer", "DenseLinear", "find_dense"]

ROLES = ("attention", "shared", "mlp", "head")
"""What a linear layer outside the experts may be, in the order of the computation."""

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_LAYER = r"(?P<layer>(?:[\w]+\.)*?(?:layers|block)\.(?P<number>\d+))\."
_ATTENTION = (
    r"(?:layer\.\d+\.)?(?:self_attn|self_attention|attention|SelfAttention|EncDecAttention)\."
    r"(?:q_proj|k_proj|v_proj|o_proj|out_proj|qkv_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_a_proj|kv_b_proj|[qkvo])"
)
_MATRICES = r"(?:gate_proj|up_proj|down_proj|gate_up_proj|input_linear|output_linear|wi|wi_0|wi_1|wo|w1|w2|w3)"
_SHARED = rf"(?:(?:mlp|block_sparse_moe|feed_forward)\.)?shared_\w+\.{_MATRICES}"
_MLP = rf"(?:layer\.\d+\.)?(?:mlp|feed_forward|DenseReluDense)\.{_MATRICES}"

_PATTERNS = {
    "attention": re.compile(rf"{_LAYER}{_ATTENTION}\.weight"),
    "shared": re.compile(rf"{_LAYER}{_SHARED}\.weight"),
    "mlp": re.compile(rf"{_LAYER}{_MLP}\.weight"),
    "head": re.compile(r"(?P<layer>lm_head)\.weight"),
}


@dataclass(frozen=True)
class DenseLinear:
    """One linear layer: y = x W^T + b, whose W may be packed; b stays as it is.

    Attributes:
        name: path of the module in transformers' model, such as `model.layers.0.self_attn.q_proj`.
        role: one of `ROLES`.
        shape: rows (outputs) and columns (inputs).
        source: the checkpoint's tensor. The packed tensor takes its name, so that transformers without moepack finds
            the wrong shape and fails.
        checkpoint: the checkpoint that holds it.
    """

    name: str
    role: str
    shape: tuple[int, int]
    source: str
    checkpoint: Checkpoint

    def matrix(self) -> torch.Tensor:
        """The weights, `[R, C]`, in the checkpoint's dtype, mapped and not read.

        Raises:
            CheckpointError: the file changed since the checkpoint was opened.
        """
        return self.checkpoint.tensor(self.source)

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes of the weights as the checkpoint stores them."""
        return self.checkpoint.info(self.source).nbytes


@dataclass(frozen=True)
class DenseLayer:
    """The linear layers of one block of the model.

    Attributes:
        name: path of the block, such as `model.layers.0`, or `lm_head`.
        linears: in the order of the computation.
    """

    name: str
    linears: tuple[DenseLinear, ...]

    def only(self, roles: frozenset[str]) -> "DenseLayer":
        """The same block with the linear layers of some roles."""
        return DenseLayer(self.name, tuple(linear for linear in self.linears if linear.role in roles))


def find_dense(
    checkpoint: Checkpoint, layers: int, taken: frozenset[str], renamed: Mapping[str, str]
) -> tuple[DenseLayer, ...]:
    """Find the linear layers of a checkpoint. No tensor is read.

    Args:
        checkpoint: the checkpoint.
        layers: layers of the model proper; what lies behind them is left alone.
        taken: tensors that belong to experts or routers.
        renamed: what transformers calls the sparse blocks, by their paths on disk.
    """
    found: dict[str, list[DenseLinear]] = {}
    for source, role, layer in _matches(checkpoint, layers):
        info = checkpoint.info(source)
        if source in taken or len(info.shape) != 2 or info.dtype not in _FLOATS:
            continue
        name = _module(source.removesuffix(".weight"), renamed)
        linear = DenseLinear(name, role, (info.shape[0], info.shape[1]), source, checkpoint)
        found.setdefault(layer, []).append(linear)
    ordered = sorted(found.items(), key=lambda item: position(item[0]))
    return tuple(DenseLayer(name, tuple(sorted(linears, key=_order))) for name, linears in ordered)


def position(path: str) -> tuple[int, int]:
    """Where a path comes in the order of execution: encoder, decoder, head; by the number of the layer."""
    stack = 2 if path.startswith("lm_head") else int(path.startswith("decoder."))
    number = re.search(r"\.(\d+)(?:\.|$)", path)
    return stack, int(number[1]) if number else 0


def _matches(checkpoint: Checkpoint, layers: int) -> Iterator[tuple[str, str, str]]:
    """Name, role and block of every tensor that is called like a linear layer."""
    for name in checkpoint.names():
        for role, pattern in _PATTERNS.items():
            match = pattern.fullmatch(name)
            if match and int(match.groupdict().get("number", 0)) < layers:
                yield name, role, match["layer"]
                break


def _module(path: str, renamed: Mapping[str, str]) -> str:
    """The path in transformers' model of a module that lies at `path` on disk."""
    for old, new in renamed.items():
        if path.startswith(f"{old}."):
            return new + path.removeprefix(old)
    return path


def _order(linear: DenseLinear) -> int:
    """Attention first; linear layers of a role in the checkpoint's order (sorting is stable)."""
    return ROLES.index(linear.role)

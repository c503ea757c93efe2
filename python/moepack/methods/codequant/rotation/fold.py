"""A rotation of the residual stream folded into a checkpoint, so that nothing runs online (CodeQuant, figure 2).

Every state h becomes h R. RMS norms do not see it once their weights have moved into the layers behind them: those
become W diag(gamma) R. Layers that write to the stream (output and down projections) become R^T W, embeddings E R. The
router reads the stream as any other layer does. A head that is tied to the embeddings is untied, for it takes in the
last norm.

Norms of queries, keys and latents lie behind a projection and stay; so do biases of layers that read the stream.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moepack.checkpoint import Checkpoint
from moepack.errors import InvalidTensorError, UnsupportedModelError
from moepack.methods.codequant.rotation.cayley import is_orthogonal

__all__ = ["EMBEDDINGS", "FAMILIES", "Folding", "check", "fold"]

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v2", "olmoe")
"""Model types whose residual stream is known to pass through RMS norms and linear layers only."""

EMBEDDINGS, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_LAYER = r"(?P<layer>model\.layers\.\d+)\."
_MLP = r"(?:mlp|block_sparse_moe)\.(?:experts\.(?:\d+\.)?|shared_experts\.)?"
_NORMS = re.compile(rf"{_LAYER}(?:input_layernorm|post_attention_layernorm)\.weight")
_ATTENTION_READS = re.compile(rf"{_LAYER}self_attn\.(?:q_proj|k_proj|v_proj|q_a_proj|kv_a_proj_with_mqa)\.weight")
_MLP_READS = re.compile(rf"{_LAYER}{_MLP}(?:gate|gate_proj|up_proj|w1|w3|gate_up_proj)(?:\.weight)?")
_WRITES = re.compile(rf"{_LAYER}(?:self_attn\.o_proj|{_MLP}(?:down_proj|w2))(?:\.weight)?")
_WRITTEN_BIAS = re.compile(rf"{_LAYER}self_attn\.o_proj\.bias")
_STAYS = re.compile(
    rf"{_LAYER}(?:self_attn\.(?:[qk]_norm|q_a_layernorm|kv_a_layernorm|q_b_proj|kv_b_proj)\.weight"
    r"|self_attn\.(?:[qkv]_proj|q_a_proj|kv_a_proj_with_mqa)\.bias|self_attn\.rotary_emb\.inv_freq)"
)


@dataclass(frozen=True)
class Folding:
    """A checkpoint with a rotation in it, computed tensor by tensor.

    Attributes:
        rotation: [H, H] float32, or None: all tensors as they are.
        names: the tensors.
        config: what changes in config.json.
    """

    checkpoint: Checkpoint
    rotation: Tensor | None
    names: tuple[str, ...]
    config: Mapping[str, Any]

    def source(self, name: str) -> str:
        """The checkpoint's tensor that a tensor is made of: a tied head is made of the embeddings."""
        return EMBEDDINGS if name == HEAD and HEAD not in self.checkpoint else name

    def tensor(self, name: str) -> Tensor:
        """A tensor with the rotation in it, in float32; what stays as it is, in the checkpoint's dtype.

        Raises:
            InvalidTensorError: it holds NaN or infinity, or overflows.
            CheckpointError: the file changed since the checkpoint was opened.
        """
        source = self.source(name)
        given = self.checkpoint.tensor(source)
        if self.rotation is None:
            return given
        if name == LAST_NORM or _NORMS.fullmatch(name):
            return torch.ones_like(given)
        if _STAYS.fullmatch(name):
            return given
        folded = self._folded(name, given.float(), self.rotation)
        if not bool(folded.isfinite().all()):
            raise InvalidTensorError("holds NaN or infinite values, or overflows once it is rotated", tensor=source)
        return folded

    def _folded(self, name: str, values: Tensor, rotation: Tensor) -> Tensor:
        if name == EMBEDDINGS or _WRITTEN_BIAS.fullmatch(name):
            return values @ rotation
        if _WRITES.fullmatch(name):
            return rotation.T @ values
        return (values * self._norm(name)) @ rotation

    def _norm(self, name: str) -> Tensor:
        """The weights of the norm in front of a layer that reads the stream."""
        if name == HEAD:
            return self.checkpoint.tensor(LAST_NORM).float()
        if match := _ATTENTION_READS.fullmatch(name):
            return self.checkpoint.tensor(f"{match['layer']}.input_layernorm.weight").float()
        match = _MLP_READS.fullmatch(name)
        assert match is not None
        return self.checkpoint.tensor(f"{match['layer']}.post_attention_layernorm.weight").float()


def check(checkpoint: Checkpoint) -> None:
    """Refuse what cannot be rotated.

    Raises:
        UnsupportedModelError: another architecture, or a tensor whose part in the stream is unknown.
    """
    kind = checkpoint.config["model_type"]
    if kind not in FAMILIES:
        message = f"only models of {', '.join(FAMILIES)} can be rotated, not of {kind}; use --rotation none"
        raise UnsupportedModelError(message, file=checkpoint.path)
    known = (_NORMS, _ATTENTION_READS, _MLP_READS, _WRITES, _WRITTEN_BIAS, _STAYS)
    for name in checkpoint.names():
        if name not in (EMBEDDINGS, HEAD, LAST_NORM) and not any(pattern.fullmatch(name) for pattern in known):
            message = "is unknown in a model that is to be rotated; use --rotation none"
            raise UnsupportedModelError(message, file=checkpoint.info(name).file, tensor=name)


def fold(checkpoint: Checkpoint, rotation: Tensor | None) -> Folding:
    """Fold a rotation into a checkpoint; no tensor is computed yet.

    Args:
        checkpoint: of one of `FAMILIES`.
        rotation: [H, H] float32, or None to leave everything as it is.

    Raises:
        UnsupportedModelError: another architecture, or a tensor whose part in the stream is unknown.
        InvalidTensorError: the matrix is not orthogonal, or of another size.
    """
    check(checkpoint)
    if rotation is None:
        return Folding(checkpoint, None, checkpoint.names(), {})
    width = checkpoint.info(EMBEDDINGS).shape[-1]
    if tuple(rotation.shape) != (width, width) or not is_orthogonal(rotation):
        raise InvalidTensorError(f"the rotation is no orthogonal matrix of {width} columns", tensor="rotation")
    names = checkpoint.names()
    if HEAD in checkpoint:
        return Folding(checkpoint, rotation, names, {})
    return Folding(checkpoint, rotation, (*names, HEAD), {"tie_word_embeddings": False})

"""Maps the tensors of a GGUF file to those of transformers' checkpoints.

llama.cpp stacks the experts of a layer, rotates neighbouring features of queries and keys in its `llama` architecture
where transformers rotates halves, and splits `kv_b_proj` of latent attention. Here experts are separate tensors again,
and the other changes are undone.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moepack.checkpoint.gguf.model import GgufModel
from moepack.errors import CheckpointError, UnsupportedModelError

__all__ = ["Made", "Piece", "made_of"]

Shape = tuple[int, ...]
Build = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """A tensor of the file, or a part of it.

    Attributes:
        name: its name.
        shape: shape of the part.
        expert: index of the matrix on the first axis; None for the whole tensor.
        rows: the rows of that matrix; None for all.
    """

    name: str
    shape: Shape
    expert: int | None = None
    rows: slice | None = None


@dataclass(frozen=True)
class Made:
    """A tensor of transformers' checkpoint.

    Attributes:
        name: its name.
        shape: its shape.
        pieces: what it is made of.
        build: computes it from the decoded pieces, or one matrix of it from those of the pieces. None if it is the only
            piece.
    """

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
    build: Build | None = None


_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    **_LATENT,
}
"""Names in a layer that most architectures share. `.weight` and `.bias` follow."""


def _shared(path: str) -> dict[str, str]:
    return {f"ffn_{name}_shexp": f"{path}.{name}_proj" for name in ("gate", "up", "down")}


_OWN: Mapping[str, Mapping[str, str]] = {
    "mixtral": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "qwen2_moe": {**_shared("mlp.shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
    "deepseek_v2": _shared("mlp.shared_experts"),
    "deepseek_v3": {
        **_shared("mlp.shared_experts"),
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
    "gpt_oss": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
    },
}
"""Further names by model type; those with `.weight` or `.bias` are complete."""

_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}

_STACK = re.compile(r"ffn_(?P<part>gate_up|gate|up|down)_exps\.(?P<end>weight|bias)")
_SINGLE = re.compile(r"ffn_(?P<part>gate|up|down)\.(?P<number>\d+)\.weight")
_NO_WEIGHTS = ("rope_freqs.weight", "attn_rot_embd.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def made_of(model: GgufModel, config: Mapping[str, Any]) -> tuple[list[Made], list[str]]:
    """Return the tensors of a model under transformers' names, and the tensors of the file that it does not have.

    The latter belong to layers of multi-token prediction.

    Raises:
        UnsupportedModelError: a tensor has no counterpart.
        CheckpointError: the shapes of experts contradict each other.
    """
    layers: dict[int, list[str]] = {}
    made, unread = [], []
    for name in model.kinds:
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        stem, _, end = name.rpartition(".")
        if match is not None:
            layers.setdefault(int(match[1]), []).append(match[2])
        elif stem in _OUTER:
            made.append(Made(f"{_OUTER[stem]}.{end}", model.shapes[name], (Piece(name, model.shapes[name]),)))
        elif name not in _NO_WEIGHTS:
            raise _unknown(model, name, config)
    count = _size(config, "num_hidden_layers", model)
    for number in sorted(layers):
        if number >= count:
            unread += [f"blk.{number}.{name}" for name in layers[number]]
        else:
            made += _layer(model, config, number, layers[number])
    return made, unread


def _size(config: Mapping[str, Any], key: str, model: GgufModel) -> int:
    """Return a number of the configuration, which may come from a file of the user."""
    found = config.get(key)
    if not isinstance(found, int) or found < 1:
        raise CheckpointError(f"the configuration beside it has no valid {key}", file=model.file)
    return found


def _unknown(model: GgufModel, name: str, config: Mapping[str, Any]) -> UnsupportedModelError:
    message = f"a tensor of '{model.architecture}' that has no counterpart in {config['model_type']}"
    return UnsupportedModelError(message, file=model.file, tensor=name)


def _layer(model: GgufModel, config: Mapping[str, Any], number: int, names: Sequence[str]) -> list[Made]:
    """Return the tensors of a layer."""
    kind, prefix = config["model_type"], f"model.layers.{number}"
    known, made = {**_BLOCK, **_OWN.get(kind, {})}, []
    stacks: dict[str, Piece] = {}
    for name in names:
        source = f"blk.{number}.{name}"
        piece = Piece(source, model.shapes[source])
        stem, _, end = name.rpartition(".")
        if _STACK.fullmatch(name) or name in ("attn_k_b.weight", "attn_v_b.weight"):
            stacks[name] = piece
        elif single := _SINGLE.fullmatch(name):
            made.append(Made(f"{prefix}.{_expert(kind, int(single['number']), single['part'])}", piece.shape, (piece,)))
        elif name in known:
            made.append(Made(f"{prefix}.{known[name]}", piece.shape, (piece,)))
        elif stem in known:
            made.append(_plain(f"{prefix}.{known[stem]}.{end}", piece, stem, model, config))
        elif name not in _NO_WEIGHTS:
            raise _unknown(model, source, config)
    if latent := [stacks.pop(name) for name in ("attn_k_b.weight", "attn_v_b.weight") if name in stacks]:
        made.append(_latent(f"{prefix}.self_attn.kv_b_proj.weight", latent, model))
    if kind == "gpt_oss":
        return made + _joined(f"{prefix}.mlp.experts", stacks, model)
    for name, piece in stacks.items():
        made += _split(name, piece, prefix, model, config)
    return made


def _expert(kind: str, number: int, part: str) -> str:
    """Return the name of a projection of an expert, below its layer."""
    if kind == "mixtral":
        return f"block_sparse_moe.experts.{number}.{_MIXTRAL[part]}.weight"
    return f"mlp.experts.{number}.{part}_proj.weight"


def _plain(name: str, piece: Piece, stem: str, model: GgufModel, config: Mapping[str, Any]) -> Made:
    """Return a tensor that is one of the file, with its rows in transformers' order."""
    if stem == "ffn_gate_inp_shexp" and len(piece.shape) == 1:  # llama.cpp stores a row as a vector
        return Made(name, (1, *piece.shape), (piece,), lambda tensor: tensor.unsqueeze(0))
    if model.architecture != "llama" or stem not in ("attn_q", "attn_k"):
        return Made(name, piece.shape, (piece,))
    heads = _size(config, "num_attention_heads" if stem == "attn_q" else "num_key_value_heads", model)
    if piece.shape[0] % (2 * heads):
        raise CheckpointError(f"{piece.shape[0]} rows are not {heads} heads", file=model.file, tensor=piece.name)

    def halves(tensor: torch.Tensor) -> torch.Tensor:
        pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)

    return Made(name, piece.shape, (piece,), halves)


def _latent(name: str, pieces: Sequence[Piece], model: GgufModel) -> Made:
    """Return `kv_b_proj` of latent attention: the keys' part, transposed in each head, and the values' part."""
    shapes = [piece.shape for piece in pieces]
    if [len(shape) for shape in shapes] != [3, 3] or shapes[0][:2] != (shapes[1][0], shapes[1][2]):
        message = "keys and values of latent attention do not match"
        raise CheckpointError(message, file=model.file, tensor=pieces[0].name)
    (heads, rank, keys), values = shapes[0], shapes[1][1]

    def joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.cat((first.mT, second.to(first.dtype)), 1).flatten(0, 1)

    return Made(name, (heads * (keys + values), rank), tuple(pieces), joined)


def _split(name: str, piece: Piece, prefix: str, model: GgufModel, config: Mapping[str, Any]) -> list[Made]:
    """Return the experts of a stacked tensor as tensors of their own."""
    match = _STACK.fullmatch(name)
    if match is None or match["end"] != "weight" or len(piece.shape) != 3:
        raise _unknown(model, piece.name, config)
    count, rows, columns = piece.shape
    parts = {match["part"]: None if match["part"] != "gate_up" else slice(0, rows)}
    if match["part"] == "gate_up":
        parts = {"gate": slice(0, rows // 2), "up": slice(rows // 2, rows)}
    found = []
    for part, share in parts.items():
        shape = (rows if share is None else share.stop - share.start, columns)
        for number in range(count):
            title = f"{prefix}.{_expert(config['model_type'], number, part)}"
            found.append(Made(title, shape, (replace(piece, shape=shape, expert=number, rows=share),)))
    return found


def _joined(prefix: str, stacks: Mapping[str, Piece], model: GgufModel) -> list[Made]:
    """Return the experts of gpt-oss: transposed, with alternating gate and up, and their biases."""
    made = []
    for end, suffix in (("weight", ""), ("bias", "_bias")):
        gate, up, down = (stacks.get(f"ffn_{part}_exps.{end}") for part in ("gate", "up", "down"))
        axes = 3 if end == "weight" else 2
        if not gate or not up or not down or gate.shape != up.shape or {len(gate.shape), len(down.shape)} != {axes}:
            message = f"gate, up and down of the experts ({end}) do not match or are missing"
            raise CheckpointError(message, file=model.file, tensor=f"{prefix}.gate_up_proj{suffix}")
        if end == "bias":
            both = (*gate.shape[:-1], 2 * gate.shape[-1])
            made.append(Made(f"{prefix}.gate_up_proj_bias", both, (gate, up), _alternating_values))
            made.append(Made(f"{prefix}.down_proj_bias", down.shape, (down,)))
            continue
        experts, inner, hidden = gate.shape
        made.append(Made(f"{prefix}.gate_up_proj", (experts, hidden, 2 * inner), (gate, up), _alternating_rows))
        turned = (*down.shape[:-2], down.shape[-1], down.shape[-2])
        made.append(Made(f"{prefix}.down_proj", turned, (down,), _transposed))
    return made


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT


def _alternating_rows(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.stack((gate, up), -2).flatten(-3, -2).mT


def _alternating_values(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.stack((gate, up), -1).flatten(-2)

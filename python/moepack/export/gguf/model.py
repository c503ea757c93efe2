"""Maps a model to llama.cpp's architecture, hyperparameters and tensor names.

llama.cpp fixes by architecture what transformers leaves to the configuration (whether top-k weights are normalized,
whether projections have biases). Models that llama.cpp would compute differently are rejected.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moepack.errors import UnsupportedModelError

__all__ = ["Config", "Model", "Piece", "rope_of"]

Config = Mapping[str, Any]
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


@dataclass(frozen=True)
class Piece:
    """A tensor of the file, made of rows of a tensor in the packed directory.

    Attributes:
        name: name in llama.cpp.
        order: indices of the rows, whose shape becomes that of the tensor; None for all rows in order.
        transposed: whether the last two axes are swapped.
    """

    name: str
    order: NDArray[np.int64] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Model:
    """llama.cpp's counterpart of a transformers architecture.

    Attributes:
        name: name in llama.cpp.
        required: settings that llama.cpp assumes, with the accepted values.
        sizes: writer methods for further hyperparameters, with the config setting passed to each.
        interleaved: whether llama.cpp rotates neighbouring features of queries and keys where transformers rotates
            halves.
        grouped: whether keys and values may have fewer heads than queries.
        scalings: supported types of rotary position scaling.
    """

    name: str
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    grouped: bool = True
    scalings: tuple[str, ...] = ("default", "linear")

    def refuse(self, config: Config) -> None:
        """Reject settings that llama.cpp would compute differently.

        Raises:
            UnsupportedModelError: names the setting.
        """
        required = {**_ALWAYS, **self.required}
        if config.get("use_sliding_window") is False:
            del required["sliding_window"]
        if not self.grouped:
            required["num_key_value_heads"] = (config["num_attention_heads"],)
        for setting, values in required.items():
            found = config.get(setting, values[0])
            if found not in values:
                message = f"llama.cpp's '{self.name}' computes {setting}={values[0]!r}, but this model has {found!r}"
                raise UnsupportedModelError(message, file="config.json")
        rope = rope_of(config)
        if rope.get("rope_type", "default") not in self.scalings:
            message = f"GGUF export does not support rotary positions of type {rope['rope_type']!r}"
            raise UnsupportedModelError(message, file="config.json")

    def write(self, gguf: Any, writer: Any, config: Config) -> None:
        """Write the hyperparameters."""
        rope = rope_of(config)
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        self.write_attention(writer, config)
        writer.add_rope_freq_base(float(rope.get("rope_theta", 10_000.0)))
        if rope.get("rope_type", "default") != "default":
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(float(rope["factor"]))
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_expert_count(next(config[name] for name in _EXPERT_COUNTS if config.get(name)))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        for method, setting in self.sizes.items():
            getattr(writer, method)(config[setting])

    def write_attention(self, writer: Any, config: Config) -> None:
        """Write the hyperparameters of attention."""
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
        writer.add_key_length(width)
        writer.add_value_length(width)
        writer.add_rope_dimension_count(width)

    def names(self, gguf: Any, config: Config) -> Callable[[str], str]:
        """Return a function that maps tensor names to llama.cpp's names. It rejects names without a counterpart."""
        known = gguf.get_tensor_name_map(
            next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.name), config["num_hidden_layers"]
        )

        def rename(name: str) -> str:
            found: str | None = known.get_name(name, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise UnsupportedModelError(f"llama.cpp's '{self.name}' has no tensor for it", tensor=name)
            return found

        return rename

    def expert_name(self, module: str, projection: str) -> str:
        """Return the name of a projection of a layer's experts.

        Raises:
            UnsupportedModelError: the projections are not gate, up and down.
        """
        layer = re.search(r"\.layers\.(\d+)\.", module)
        if layer is None or projection not in _EXPERTS:
            raise UnsupportedModelError(f"llama.cpp has no experts with the projection '{projection}'", tensor=module)
        return f"blk.{layer[1]}.{_EXPERTS[projection]}.weight"

    def pieces(self, name: str, rows: int, config: Config) -> list[Piece]:
        """Return the pieces of the tensor with llama.cpp's name `name` and `rows` rows."""
        found = re.fullmatch(r"blk\.\d+\.attn_(q|k)\.weight", name)
        if not self.interleaved or found is None:
            return [Piece(name)]
        heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        order = np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)
        return [Piece(name, order)]


def rope_of(config: Config) -> Mapping[str, Any]:
    """Return the settings of rotary positions from a newer or older configuration."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", 10_000.0),
        **(config.get("rope_scaling") or {}),
    }
    return rope


_ALWAYS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "sliding_window": (None, 0),
    "clip_qkv": (None,),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1,),
}

"""vLLM's configuration for a packed directory: which layers compute on packed bytes.

vLLM merges layers that checkpoints store separately (queries, keys and values; gate and up). A merged layer is packed
if any of its parts is. Layers whose weights vLLM reads (`kv_b_proj`, which latent attention absorbs), and experts other
than SwiGLU are ordinary layers for vLLM, and `loader` decodes their weights.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from moepack.checkpoint.resolve import resolve_model
from moepack.export.names import experts_of
from moepack.format.directory import PackedDirectory
from moepack.integrations.transformers import LINEAR, METHOD, MoepackConfig
from moepack.modules.experts import PackedExperts
from moepack.stores.base import Shape
from moepack.vllm.experts import PackedExpertsMethod
from moepack.vllm.linear import PackedLinearMethod
from moepack.vllm.parts import Part

__all__ = ["METHOD", "PackedConfig"]

_ABSORBED = "kv_b_proj"

_DRAFT = "draft_model."
"""What vLLM puts before the paths of a draft model."""

_ROTATED = re.compile(r"(?!.*vision).+\.self_attn\.[qk]_proj\.weight")
"""Names of the matrices of queries and keys of a language model."""

_NOT_ADAPTED = {"gate", "router", "embed_tokens", "lm_head"}


class PackedConfig(QuantizationConfig):  # type: ignore[misc]
    """The quantization method `moepack`.

    Attributes:
        modules: the directory's packed linear layers, embeddings and gated experts, by their path on the hub.
        plain: its matrices that are not packed, which may be parts of merged layers, by their path on the hub.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[str, Part] = {}
        self.plain: dict[str, Part] = {}

    @classmethod
    def get_name(cls) -> str:
        """Return the name in config.json."""
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the supported dtypes of activations."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the minimum compute capability of the kernels (Ampere)."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return an empty list: config.json contains all settings."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PackedConfig":
        """Read config.json's `quantization_config`.

        Raises:
            LoadError: the directory needs a newer moepack.
            CorruptionError: the entries are not what the format says.
        """
        MoepackConfig(**config)
        return cls()

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read the packed modules from the directory or Hub model. Errors as for `PackedDirectory.open`."""
        self.read(PackedDirectory.open(resolve_model(model_name if revision is None else f"{model_name}@{revision}")))

    def read(self, source: PackedDirectory) -> None:
        """Read the modules of a directory; errors as for `experts_of`."""
        records, pairs = source.manifest.packed(), _pairs(source.config)
        for name, record in source.manifest.tensors.items():
            if not record.experts and len(record.shape) == 2 and name.endswith(f".{LINEAR}"):
                rows, columns = record.shape
                rotated = pairs if _ROTATED.fullmatch(name) else 0
                part = Part({LINEAR: name}, {LINEAR: (1, rows, columns)}, record.packed, rotated)
                (self.modules if record.packed else self.plain)[name.removesuffix(f".{LINEAR}")] = part
        for layer in experts_of(source):
            if set(layer.packed) == set(PackedExperts.projections):
                shapes = {projection: _shape(records[name].shape) for projection, name in layer.packed.items()}
                self.modules[f"{layer.block}.experts"] = Part(layer.packed, shapes)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename modules to vLLM's paths."""
        self.modules = hf_to_vllm_mapper.apply_dict(self.modules)
        self.plain = hf_to_vllm_mapper.apply_dict(self.plain)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the method of a layer; None for layers that vLLM computes itself."""
        prefix = prefix.removeprefix(_DRAFT)
        if isinstance(layer, LinearBase):
            parts = self._parts(prefix)
            return PackedLinearMethod(parts) if parts else UnquantizedLinearMethod()
        part = self.modules.get(prefix.removesuffix(".routed_experts"))
        if isinstance(layer, RoutedExperts) and part is not None and _is_swiglu(layer):
            return PackedExpertsMethod(part, layer.moe_config)
        return None

    def linear_names(self) -> list[str]:
        """Return the names of the linear layers that may have adapters: all but routers, embeddings and heads."""
        linear = {path for path, part in {**self.plain, **self.modules}.items() if LINEAR in part.tensors}
        return sorted({path.rpartition(".")[2] for path in linear} - _NOT_ADAPTED)

    def _parts(self, prefix: str) -> Sequence[Part]:
        """Return the modules that a linear layer merges; empty if none of them is packed, or one is missing."""
        parent, _, name = prefix.rpartition(".")
        if name == _ABSORBED:
            return ()
        paths = [f"{parent}.{each}" if parent else each for each in self.packed_modules_mapping.get(name, [name])]
        if not any(path in self.modules for path in paths):
            return ()
        found = [self.modules.get(path) or self.plain.get(path) for path in paths]
        return () if None in found else [part for part in found if part is not None]


def _pairs(config: Mapping[str, Any]) -> int:
    """Return the size of a Llama 4's heads, whose queries and keys vLLM reorders when it loads them; otherwise 0."""
    text = config.get("text_config") or config
    if text.get("model_type") != "llama4_text":
        return 0
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


def _shape(shape: Sequence[int]) -> Shape:
    experts, rows, columns = shape
    return experts, rows, columns


def _is_swiglu(layer: Any) -> bool:
    """Return whether routed experts compute down(silu(gate) * up) and apply router weights to the output."""
    activation = getattr(layer.activation, "value", layer.activation)
    clamped = getattr(layer, "swiglu_limit", None) is not None
    return activation == "silu" and not clamped and not layer.apply_router_weight_on_input

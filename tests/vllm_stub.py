"""A stub of vLLM: the interfaces that moepack's plugin uses, as documented by vLLM, and a model made of them.

Routing and attention are omitted: tests call the layers. `VllmConfig` is built by vLLM before it starts workers.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig

quantizations: dict[str, type] = {}
loaders: dict[str, type] = {}


class QuantizeMethodBase(ABC):
    @abstractmethod
    def create_weights(self, layer: nn.Module, *arguments: Any, **attributes: Any) -> None: ...

    @abstractmethod
    def apply(self, layer: nn.Module, *arguments: Any, **others: Any) -> torch.Tensor: ...


class QuantizationConfig(ABC):
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None: ...


class LinearMethodBase(QuantizeMethodBase):
    """The base of methods of linear layers."""


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(
        self, layer: Any, columns: int, rows: list[int], input_size: int, output_size: int, dtype: torch.dtype, **_: Any
    ) -> None:
        layer.weight = nn.Parameter(torch.empty(sum(rows), columns, dtype=dtype), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight, bias)


class LinearBase(nn.Module):
    def __init__(self, columns: int, rows: list[int], config: QuantizationConfig, prefix: str) -> None:
        super().__init__()
        method = config.get_quant_method(self, prefix=prefix)
        assert method is not None, "All linear layers should support quant method."
        self.quant_method: Any = method
        dtype = torch.get_default_dtype()
        method.create_weights(self, columns, rows, columns, sum(rows), dtype, weight_loader=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x, None)


class FusedMoEMethodBase(QuantizeMethodBase):
    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.moe = moe

    @abstractmethod
    def get_fused_moe_quant_config(self, layer: nn.Module) -> Any: ...


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    def create_weights(self, layer: Any, **_: Any) -> None:
        layer.w13_weight = nn.Parameter(torch.empty(0))

    def apply(self, layer: nn.Module, *arguments: Any, **others: Any) -> torch.Tensor: ...

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None: ...


class RoutedExperts(nn.Module):
    apply_router_weight_on_input = False
    swiglu_limit = None

    def __init__(self, sizes: tuple[int, int, int], config: QuantizationConfig, prefix: str, activation: str) -> None:
        super().__init__()
        self.activation, self.moe_config = SimpleNamespace(value=activation), SimpleNamespace(num_experts=sizes[0])
        method: Any = config.get_quant_method(self, prefix) or UnquantizedFusedMoEMethod(self.moe_config)
        assert isinstance(method, FusedMoEMethodBase)
        self.quant_method = method
        names = "num_experts", "intermediate_size_per_partition", "hidden_size"
        dtype = torch.get_default_dtype()
        method.create_weights(layer=self, **dict(zip(names, sizes, strict=True)), params_dtype=dtype)


class BaseModelLoader(ABC):
    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: Any) -> None: ...

    @abstractmethod
    def load_weights(self, model: nn.Module, model_config: Any) -> None: ...


class Model(nn.Module):
    """A decoder's layers with vLLM's names: `qkv_proj` joins three layers of the hub."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, settings: Any, quantization: Any, block: str, activation: str = "silu") -> None:
        super().__init__()
        quantization.packed_modules_mapping |= self.packed_modules_mapping
        self.embedding, self.loaded = nn.Parameter(torch.empty(1)), dict[str, torch.Tensor]()
        width = settings.hidden_size // settings.num_attention_heads
        queries, keys = (width * heads for heads in (settings.num_attention_heads, settings.num_key_value_heads))
        sizes = settings.num_local_experts, settings.intermediate_size, settings.hidden_size
        for number in range(settings.num_hidden_layers):
            path = f"model.layers.{number}"
            layer = nn.Module()
            rows = [queries, keys, keys]
            layer.qkv_proj = LinearBase(settings.hidden_size, rows, quantization, f"{path}.self_attn.qkv_proj")
            layer.o_proj = LinearBase(queries, [settings.hidden_size], quantization, f"{path}.self_attn.o_proj")
            layer.experts = RoutedExperts(sizes, quantization, f"{path}.{block}.experts", activation)
            self.add_module(str(number), layer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded = dict(weights)


def register_quantization_config(name: str) -> Any:
    return lambda kind: quantizations.setdefault(name, kind)


def register_model_loader(name: str) -> Any:
    return lambda kind: loaders.setdefault(name, kind)


class VllmConfig:
    """The part of vLLM's settings that the plugin reads; `__post_init__` sets the quantization.

    Args:
        directory: the model's; its `config.json` says how it is quantized.
        load_format: of the model.
        parallel: settings of the parallel configuration that are not 1 or off.
        others: attributes beside the configurations of the model, its loading and parallel work.
    """

    quant_config: Any = None

    def __init__(self, directory: Path, load_format: str = "moepack", parallel: Any = None, **others: Any) -> None:
        self.model_config, self.load_config = model(directory), SimpleNamespace(load_format=load_format)
        sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
        self.parallel_config = SimpleNamespace(**sizes | {"enable_expert_parallel": False} | (parallel or {}))
        self.cache_config, self.lora_config, self.speculative_config = SimpleNamespace(), None, None
        self.compilation_config = SimpleNamespace(cudagraph_mode=SimpleNamespace(name="NONE"))
        vars(self).update(others)
        self.__post_init__()

    def __post_init__(self) -> None:
        if self.model_config.quantization is not None:
            kind: Any = quantizations[self.model_config.quantization]
            self.quant_config = kind.from_config(self.model_config.hf_config.quantization_config)
            self.quant_config.maybe_update_config(self.model_config.model, self.model_config.hf_config, revision=None)


def model(directory: Path) -> Any:
    """vLLM's configuration of a model."""
    config = AutoConfig.from_pretrained(directory)
    quantization = getattr(config, "quantization_config", None)
    quantization = quantization if isinstance(quantization, dict | None) else quantization.to_dict()
    config.quantization_config = quantization
    method = None if quantization is None else quantization["quant_method"]
    return SimpleNamespace(model=str(directory), revision=None, hf_config=config, quantization=method)


@contextmanager
def installed() -> Iterator[None]:
    """Make `import vllm` find this module."""
    layers = "vllm.model_executor.layers"
    content: dict[str, list[Any]] = {
        "vllm.config": [VllmConfig],
        f"{layers}.fused_moe": [RoutedExperts, FusedMoEMethodBase],
        f"{layers}.linear": [LinearBase, LinearMethodBase, UnquantizedLinearMethod],
        f"{layers}.quantization": [register_quantization_config],
        f"{layers}.quantization.base_config": [QuantizationConfig],
        "vllm.model_executor.model_loader": [register_model_loader],
        "vllm.model_executor.model_loader.base_loader": [BaseModelLoader],
    }
    names = {name[:end] for name in content for end, at in enumerate(f"{name}.") if at == "."}
    modules = {name: ModuleType(name) for name in names}
    for name, members in content.items():
        vars(modules[name]).update({member.__name__: member for member in members})
    sys.modules.update(modules)
    unchecked = VllmConfig.__post_init__
    try:
        yield
    finally:
        VllmConfig.__post_init__ = unchecked  # type: ignore[method-assign]
        for name in [name for name in sys.modules if name in modules or name.startswith("moepack.vllm")]:
            del sys.modules[name]

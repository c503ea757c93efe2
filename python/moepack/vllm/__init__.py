"""vLLM runs packed directories: `vllm serve DIR --load-format moepack --enforce-eager`, where both are installed.

vLLM calls the entry point `vllm.general_plugins` in each of its processes, and `register` there names the quantization
method `moepack` (`configuration`) and the load format of that name (`loader`). Layers that vLLM and moepack see alike
multiply from packed bytes (`methods`); all others get their weights decoded, under the names of the hub. What packed
tensors cannot do is refused before workers start (`settings`).

Written against vLLM's interfaces of 2026: `VllmConfig`, `QuantizationConfig`, `LinearMethodBase`, `FusedMoEMethodBase`
of `RoutedExperts`, `BaseModelLoader`. Nothing else of moepack imports vLLM.
"""

__all__ = ["register"]

_registered: list[str] = []


def register() -> None:
    """Register the quantization method, the load format and the check of settings with vLLM; again is a no-op."""
    if _registered:
        return
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from moepack.vllm.configuration import METHOD, PackedConfig
    from moepack.vllm.loader import PackedLoader
    from moepack.vllm.settings import guard

    register_quantization_config(METHOD)(PackedConfig)
    register_model_loader(METHOD)(PackedLoader)
    guard(VllmConfig)
    _registered.append(METHOD)

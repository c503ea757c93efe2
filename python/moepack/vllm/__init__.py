"""vLLM runs packed directories: `vllm serve DIR --load-format moepack --enforce-eager`, where both are installed.

vLLM calls the entry point `vllm.general_plugins` in each of its processes, and `register` there names the quantization
method `moepack` (`configuration`) and the load format of that name (`loader`). Layers that vLLM and moepack see alike
multiply from packed bytes (`methods`); all others get their weights decoded, under the names of the hub.

Written against vLLM's interfaces of 2026: `QuantizationConfig`, `LinearMethodBase`, `FusedMoEMethodBase` of
`RoutedExperts`, `BaseModelLoader`. Nothing else of moepack imports vLLM.
"""

__all__ = ["register"]

_registered: list[str] = []


def register() -> None:
    """Register the quantization method and the load format with vLLM; again is a no-op."""
    if _registered:
        return
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from moepack.vllm.configuration import METHOD, PackedConfig
    from moepack.vllm.loader import PackedLoader

    register_quantization_config(METHOD)(PackedConfig)
    register_model_loader(METHOD)(PackedLoader)
    _registered.append(METHOD)

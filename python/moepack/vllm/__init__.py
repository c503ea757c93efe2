"""The vLLM plugin: `vllm serve DIR` runs packed directories.

vLLM calls the entry point `vllm.general_plugins` in each of its processes. `register` adds the quantization method
`moepack` (`configuration`) and the load format of the same name (`loader`). Layers that correspond in vLLM and moepack
compute on packed bytes (`linear`, `experts`, `vocabulary`), of which each rank holds its part (`parts`); all others get
decoded weights under their checkpoint names. Settings that packed tensors do not support are rejected before workers
start (`settings`).

Written against vLLM's interfaces of 2026: `VllmConfig`, `QuantizationConfig`, `LinearMethodBase`, `FusedMoEMethodBase`
of `RoutedExperts`, `BaseModelLoader`. Nothing else of moepack imports vLLM.
"""

__all__ = ["register"]

_registered: list[str] = []


def register() -> None:
    """Register the quantization method, the load format and the check of settings with vLLM. Idempotent.

    A version of vLLM that is not supported gets a quantization method that rejects packed directories.
    """
    if _registered:
        return
    import vllm
    from vllm.model_executor.layers.quantization import register_quantization_config

    from moepack.vllm.version import unsupported

    reason = unsupported(vllm.__version__)
    if reason is not None:
        from moepack.vllm.refusal import METHOD, refusing

        register_quantization_config(METHOD)(refusing(reason))
        _registered.append(METHOD)
        return
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader import register_model_loader

    from moepack.vllm.configuration import METHOD, PackedConfig
    from moepack.vllm.loader import PackedLoader
    from moepack.vllm.settings import guard

    register_quantization_config(METHOD)(PackedConfig)
    register_model_loader(METHOD)(PackedLoader)
    guard(VllmConfig)
    _registered.append(METHOD)

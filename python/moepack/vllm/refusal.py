"""The quantization method for versions of vLLM that the plugin does not support: it rejects packed directories."""

from typing import Any

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from moepack.errors import LoadError
from moepack.integrations.transformers import METHOD

__all__ = ["METHOD", "refusing"]


def refusing(reason: str) -> type:
    """Return a quantization method that raises `LoadError` with a reason if a model is packed."""

    class Refused(QuantizationConfig):  # type: ignore[misc]
        @classmethod
        def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], *_: Any, **__: Any) -> None:
            """Reject a packed model. vLLM asks every method about every quantized model, in the user's process."""
            if hf_quant_cfg.get("quant_method") == METHOD:
                raise LoadError(reason)

    return Refused

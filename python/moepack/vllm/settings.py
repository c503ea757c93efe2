"""Checks vLLM's settings for packed tensors when vLLM assembles its configuration.

The check runs in the user's process before any worker starts, because users see an error in a worker only as "Engine
core initialization failed". vLLM has no plugin hook for all settings, so `guard` extends `VllmConfig.__post_init__`,
which every way to start an engine calls.
"""

from collections.abc import Iterator
from functools import wraps
from typing import Any

from moepack.errors import LoadError
from moepack.integrations.transformers import METHOD

__all__ = ["GRAPH_TOKENS", "guard"]

GRAPH_TOKENS = 64
"""Maximum tokens of a packed product in a CUDA graph."""

SIZES = ("data_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size")
"""Settings of vLLM's parallel configuration for which packed experts have no exchange of tokens if above 1."""


def guard(kind: Any) -> None:
    """Make vLLM's configuration class `kind` reject settings that packed tensors do not support.

    Its constructor then raises a `LoadError` that names the option.
    """
    theirs = kind.__post_init__

    @wraps(theirs)
    def checked(self: Any, *arguments: Any, **others: Any) -> None:
        packed = _require_formats(self)
        if packed:
            _require_settings(self)
        theirs(self, *arguments, **others)
        if packed:
            _require_graphs(self.compilation_config)

    kind.__post_init__ = checked


def _models(settings: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the configuration and load configuration of the draft model, if there is one, and of the model.

    In the configuration that vLLM derives for a draft, the draft is the model and keeps its own load configuration.
    """
    speculative = getattr(settings, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None:
        yield draft, getattr(speculative, "draft_load_config", None) or settings.load_config
    if settings.model_config is not None and settings.model_config is not draft:
        yield settings.model_config, settings.load_config


def _require_formats(settings: Any) -> bool:
    """Reject load formats that do not match the model; return whether any model is packed."""
    found = False
    for model, load in _models(settings):
        packed, asked = model.quantization == METHOD, load.load_format == METHOD
        if packed and not asked:
            raise LoadError(
                f"vLLM's own loader cannot read packed tensors: start it with --load-format {METHOD}", file=model.model
            )
        if asked and not packed:
            raise LoadError(
                f"it is not a packed directory: leave out --load-format {METHOD}, or set the draft_load_config of a "
                "draft model",
                file=model.model,
            )
        found |= packed
    return found


def _require_settings(settings: Any) -> None:
    parallel = settings.parallel_config
    for name in SIZES:
        if getattr(parallel, name, 1) > 1:
            raise LoadError(f"packed experts do not exchange tokens between such ranks: leave {_option(name)} at 1")
    if getattr(parallel, "enable_eplb", False):
        raise LoadError("packed experts stay on their rank and cannot be balanced: leave out --enable-eplb")
    if getattr(settings, "lora_config", None) is not None:
        raise LoadError("packed tensors do not support vLLM's adapters: leave out --enable-lora")
    offload = getattr(getattr(settings, "offload_config", None), "uva", None)
    if getattr(offload, "cpu_offload_gb", 0) or getattr(settings.cache_config, "cpu_offload_gb", 0):
        raise LoadError("vLLM cannot move packed tensors to the CPU: leave out --cpu-offload-gb")


def _require_graphs(compilation: Any) -> None:
    """Reject CUDA graphs with more tokens than packed products support."""
    mode = getattr(compilation, "cudagraph_mode", None)
    sizes = getattr(compilation, "cudagraph_capture_sizes", None) or [0]
    if getattr(mode, "name", "NONE") != "NONE" and max(sizes) > GRAPH_TOKENS:
        raise LoadError(
            f"packed products can be recorded for up to {GRAPH_TOKENS} tokens, but vLLM would record {max(sizes)}: "
            f"start it with --enforce-eager or --max-cudagraph-capture-size {GRAPH_TOKENS}"
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"

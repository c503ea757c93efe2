"""Checks vLLM's settings for packed tensors when vLLM assembles its configuration.

The check runs in the user's process before any worker starts, because users see an error in a worker only as "Engine
core initialization failed". vLLM has no plugin hook for all settings, so `guard` extends `VllmConfig.__post_init__`,
which every way to start an engine calls.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from moepack.backends.gpu.prompt import DECODED_BYTES
from moepack.errors import LoadError
from moepack.format.directory import read_manifest
from moepack.integrations.transformers import METHOD
from moepack.vllm.parts import directory_of

__all__ = ["GRAPH_TOKENS", "guard"]

logger = logging.getLogger("vllm.moepack")  # below the logger that vLLM configures

GRAPH_TOKENS = 64
"""Maximum tokens of a packed product in a CUDA graph, on GPUs where products of more tokens wait for the device."""

GRAPH_PAIRS = 512
"""Maximum pairs of a token and an expert of packed experts in such a graph."""

SIZES = ("data_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size")
"""Settings of vLLM's parallel configuration for which packed experts have no exchange of tokens if above 1."""

EXPERTS = frozenset(["experts", "w1", "w2", "w3", "w13"])
"""Names by which vLLM's adapters address experts."""


def guard(kind: Any) -> None:
    """Make vLLM's configuration class `kind` reject settings that packed tensors do not support.

    Its constructor then raises a `LoadError` that names the option.
    """
    theirs = kind.__post_init__

    @wraps(theirs)
    def checked(self: Any, *arguments: Any, **others: Any) -> None:
        _choose_format(self)
        _load_draft(self)
        packed = _require_formats(self)
        if packed:
            _require_settings(self)
            _limit_graphs(self)
        theirs(self, *arguments, **others)
        if packed:
            _require_graphs(self)
            _keep_adapters_off_experts(self)

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


def _is_packed(model: Any) -> bool:
    return bool(model.quantization == METHOD)


def _choose_format(settings: Any) -> None:
    """Load a packed model with moepack's loader if the user has not chosen a load format."""
    model, load = settings.model_config, settings.load_config
    if model is not None and model.quantization == METHOD and load.load_format == "auto":
        load.load_format = METHOD
        logger.info("%s is packed: moepack loads it (--load-format %s)", model.model, METHOD)


def _load_draft(settings: Any) -> None:
    """Give a draft model the load format of its own weights, where vLLM would take the model's.

    In the configuration that vLLM derives for the draft, its loader reads `load_config`.
    """
    speculative = getattr(settings, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if speculative is None or draft is None:
        return
    packed, inherited = draft.quantization == METHOD, settings.load_config.load_format == METHOD
    if speculative.draft_load_config is None and packed != inherited:
        speculative.draft_load_config = replace(settings.load_config, load_format=METHOD if packed else "auto")
    if settings.model_config is draft and speculative.draft_load_config is not None:
        settings.load_config = speculative.draft_load_config


def _require_formats(settings: Any) -> bool:
    """Reject load formats that do not match the model; return whether any model is packed."""
    found = False
    for model, load in _models(settings):
        packed, asked = _is_packed(model), load.load_format == METHOD
        if packed and not asked:
            raise LoadError(
                f"vLLM's own loader cannot read packed tensors: leave out --load-format {load.load_format}",
                file=model.model,
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
    adapted = getattr(getattr(settings, "lora_config", None), "target_modules", None)
    if adapted and (experts := sorted(set(adapted) & EXPERTS)):
        raise LoadError(f"packed experts take no adapters of vLLM: leave {experts} out of --lora-target-modules")
    offload = getattr(getattr(settings, "offload_config", None), "uva", None)
    if getattr(offload, "cpu_offload_gb", 0) or getattr(settings.cache_config, "cpu_offload_gb", 0):
        raise LoadError("vLLM cannot move packed tensors to the CPU: leave out --cpu-offload-gb")


def _keep_adapters_off_experts(settings: Any) -> None:
    """Restrict vLLM's adapters to linear layers, unless the user restricts them.

    vLLM would replace the packed experts, too, and can adapt only kernels of its own. An adapter of experts is then
    rejected by vLLM when it is loaded, with the names that it may have.
    """
    adapters, quantization = getattr(settings, "lora_config", None), settings.quant_config
    if adapters is not None and adapters.target_modules is None and hasattr(quantization, "linear_names"):
        adapters.target_modules = quantization.linear_names()


def _limit_graphs(settings: Any) -> None:
    """Let vLLM record graphs for as many tokens as packed products support, unless the user sets the sizes."""
    compilation, most = settings.compilation_config, _graph_tokens(settings)
    if most and compilation.cudagraph_capture_sizes is None and compilation.max_cudagraph_capture_size is None:
        compilation.max_cudagraph_capture_size = most


def _graph_tokens(settings: Any) -> int | None:
    """Return the maximum number of tokens of packed products in a graph; None if graphs may have any number."""
    if _on_hopper() and all(_records_at_any_length(model) for model, _ in _models(settings) if _is_packed(model)):
        return None
    chosen = getattr(settings.model_config.hf_text_config, "num_experts_per_tok", None) or 1
    return max(1, min(GRAPH_TOKENS, GRAPH_PAIRS // chosen))


def _on_hopper() -> bool:
    """Return whether vLLM runs on Hopper. This does not start CUDA in the user's process."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda() and current_platform.get_device_capability() == (9, 0))


def _records_at_any_length(model: Any) -> bool:
    """Return whether the experts of a layer fit into the work space in which Hopper decodes all of them at once.

    Their products then wait for nothing, in any format and for any number of tokens (`backends.gpu.prompt`).
    """
    if model.dtype is not torch.bfloat16:
        return False
    records = read_manifest(directory_of(model)).packed().values()
    shapes = [record.shape for record in records if record.experts]
    sizes = [2 * experts * rows * columns for experts, rows, columns in shapes]
    aligned = all(rows % 8 == columns % 8 == 0 for _, rows, columns in shapes)
    return aligned and max(sizes, default=0) <= DECODED_BYTES


def _require_graphs(settings: Any) -> None:
    """Reject CUDA graphs with more tokens than packed products support."""
    compilation, most = settings.compilation_config, _graph_tokens(settings)
    mode = getattr(compilation, "cudagraph_mode", None)
    sizes = getattr(compilation, "cudagraph_capture_sizes", None) or [0]
    if most and getattr(mode, "name", "NONE") != "NONE" and max(sizes) > most:
        raise LoadError(
            f"packed products can be recorded for up to {most} tokens, but vLLM would record {max(sizes)}: "
            f"leave out its sizes, or set --max-cudagraph-capture-size {most}"
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"

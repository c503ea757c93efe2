"""Opens a checkpoint, quantized or not, in the form that the pipeline reads."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from moepack.checkpoint.companion import companion, is_file
from moepack.checkpoint.dense import FLOATS
from moepack.checkpoint.gguf import gguf_files, open_gguf
from moepack.checkpoint.headed import headed
from moepack.checkpoint.quantized.checkpoint import QuantizedCheckpoint
from moepack.checkpoint.quantized.scheme import Scheme
from moepack.checkpoint.quantized.schemes import METHODS
from moepack.checkpoint.reader import Checkpoint
from moepack.checkpoint.tied import untied
from moepack.checkpoint.wrappers import unwrapped
from moepack.errors import CheckpointError, UnsupportedModelError
from moepack.format.regular import read_json

__all__ = ["adapted", "open_checkpoint"]

MODELOPT = "hf_quant_config.json"
"""The settings of ModelOpt, in releases that do not write them into config.json."""

_PLAIN = "start from the f32, f16 or bf16 weights"


def open_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """Open a checkpoint, quantized or not. Arguments and errors as for `Checkpoint.open`.

    Args:
        path: a directory as for `Checkpoint.open`, or a file as for `companion`.

    Raises:
        UnsupportedModelError: the quantization is not supported; the message names it.
        CheckpointError: scales are missing, or their shape does not match the codes.
    """
    directory = companion(Path(path)) if is_file(Path(path)) else Path(path)
    if parts := gguf_files(directory):
        return adapted(open_gguf(directory, parts))
    return adapted(Checkpoint.open(directory))


def adapted(checkpoint: Checkpoint) -> Checkpoint:
    """Return the form of a checkpoint that the pipeline reads: plain names, ties and classes, decoded weights.

    Raises:
        UnsupportedModelError, CheckpointError: as for `open_checkpoint`.
    """
    checkpoint = untied(unwrapped(headed(checkpoint)))
    settings = _settings(checkpoint)
    if not isinstance(settings, dict) or settings.get("quant_method") in (None, "moepack"):
        return checkpoint
    return QuantizedCheckpoint(checkpoint, str(settings["quant_method"]), _schemes(checkpoint, settings))


def _settings(checkpoint: Checkpoint) -> Any:
    """Return the quantization settings of a checkpoint; None if there are none."""
    settings = checkpoint.config.get("quantization_config") or checkpoint.config.get("compression_config")
    if not settings and (checkpoint.path / MODELOPT).is_file():
        return {**read_json(checkpoint.path / MODELOPT, CheckpointError), "quant_method": "modelopt"}
    return settings


def _schemes(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Sequence[Scheme]:
    """Return the quantization schemes of a checkpoint, from its settings and tensor names."""
    method, file = settings["quant_method"], checkpoint.path / "config.json"
    known = METHODS.get(method.lower()) if isinstance(method, str) else None
    if known is None:
        message = f"already quantized by {method!r}; moepack decodes {', '.join(METHODS)}: {_PLAIN}"
        raise UnsupportedModelError(message, file=file)
    try:
        schemes = known(settings, checkpoint.names())
    except (AttributeError, KeyError, TypeError, ValueError) as cause:
        detail = f"no setting {cause}" if isinstance(cause, KeyError) else str(cause)
        message = f"already quantized by '{method}' with settings that moepack does not support ({detail}); {_PLAIN}"
        raise UnsupportedModelError(message, file=file) from cause
    if not any(scheme.holds(checkpoint, name) for scheme in schemes for name in checkpoint.names()):
        sought = " or ".join(scheme.sought for scheme in schemes)
        found = next(filter(lambda name: _may_be_codes(checkpoint, name), checkpoint.names()), None)
        advice = "if they are not, remove quantization_config from config.json"
        if found is not None:
            dtype = str(checkpoint.info(found).dtype).removeprefix("torch.")
            advice = f"{found} is in {dtype}, which is not supported here; {_PLAIN}"
        message = f"says that the weights are already quantized by '{method}', but none of the tensors is {sought}"
        raise UnsupportedModelError(f"{message}; {advice}", file=file)
    return schemes


def _may_be_codes(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a tensor holds one or several matrices in a dtype other than floating point."""
    info = checkpoint.info(name)
    return len(info.shape) > 1 and info.dtype not in (*FLOATS, torch.bool)

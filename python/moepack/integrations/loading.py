"""Loads model directories for inference.

`load` accepts packed directories. `open_model` also accepts ordinary checkpoints, for comparisons between the two.
"""

from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch

from moepack.backends.compute import set_compute_mode
from moepack.backends.threads import set_threads
from moepack.checkpoint import Checkpoint
from moepack.checkpoint.classes import configuration, model_class
from moepack.checkpoint.quantized import QuantizedCheckpoint, open_checkpoint
from moepack.checkpoint.resolve import resolve_model
from moepack.decoding.carried import carried_of
from moepack.decoding.decoder import install
from moepack.decoding.vocabulary import watch
from moepack.errors import CheckpointError, CorruptionError, DeviceError, LoadError, MoepackError, UnsupportedModelError
from moepack.format.directory import check_listed, read_manifest
from moepack.format.header import read_header
from moepack.format.hub import ADAPTER, CONFIG
from moepack.format.manifest import MANIFEST
from moepack.format.plausible import check_config
from moepack.format.regular import read_json
from moepack.format.weights import weight_files
from moepack.modules.foresight import foresee
from moepack.stores.resident import ResidentStore
from moepack.stores.streaming import stream
from moepack.stores.tiers import MISSES, Gpu, Misses, keep_on
from moepack.units import byte_count

__all__ = ["is_packed", "load", "open_model", "open_tokenizer"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    directory: str | PathLike[str],
    dtype: torch.dtype | str | None = None,
    threads: int | None = None,
    mode: str | None = None,
    resident: bool = False,
    device: torch.device | str | None = None,
    device_map: Mapping[str, Any] | str | None = None,
    host_memory: str | int | None = None,
    guess: bool = True,
    approximate: bool = False,
    device_memory: str | int | None = None,
    misses: Misses = "auto",
) -> Any:
    """Load a packed directory as a transformers model, in evaluation mode.

    On the CPU, experts stay in the mapped files, so loading adds almost no anonymous memory. On a GPU, packed bytes are
    uploaded unchanged (docs/gpu.md).

    Args:
        directory: a directory written by `moepack compress`, or the Hub id of one (`ORGANIZATION/NAME[@REVISION]`).
        dtype: dtype of dense layers and activations, a torch dtype or its name; None uses the checkpoint's.
        threads: CPU threads of the packed kernels and of torch, for the whole process; None keeps the current setting.
        mode: compute mode of this model's packed weights: "auto" (exact for few tokens, bf16 for many), "exact"
            (float32 precision), "bf16" (rounded to bf16), "int8" (activations quantized per token and group of
            columns), or None for the mode of the process (`moepack.set_compute_mode`, MOEPACK_COMPUTE).
        resident: read all weights into anonymous memory, in huge pages (see docs/performance.md for when this helps).
        device: device of the whole model: "cpu", "cuda", "cuda:1"; None means the CPU.
        device_map: device of each layer, instead of `device`: "auto" fills the GPUs, then the CPU; or a mapping from
            module paths to devices, as in transformers. Layers on the CPU run there, from the mapped files.
        host_memory: caps the RAM for weights, for example "8GB" or "7.5GiB". Weights that every token needs stay in
            RAM; experts are read from disk when chosen, and the remaining memory caches those of recent tokens
            (docs/offload.md). None maps the files. With `device_memory`, caps the pinned RAM for experts; None keeps
            all of them in RAM.
        guess: with `host_memory`, prefetch the likely experts of the next layer. Outputs do not change.
        approximate: for experts stored by channels, select the channels with the input of the previous layer, so that
            no read is waited for. Outputs change.
        device_memory: caps the memory for weights on `device`, a GPU; the other experts are copied from RAM when
            chosen (docs/gpu.md).
        misses: with `device_memory`, what happens to chosen experts that are not on the GPU: "moved" copies them there,
            "computed" multiplies them on the CPU, "auto" splits them by measured times to finish soonest (docs/gpu.md).

    Returns:
        The model, of the class named in config.json, such as `...ForCausalLM` or `...ForConditionalGeneration`.

    Raises:
        CheckpointError: the model cannot be downloaded from the Hub.
        LoadError: the directory is not a packed model, needs a newer moepack, does not fit in the available memory with
            `resident`, or needs more than `host_memory`.
        DeviceError: the GPU cannot be used: none is present, or the GPU or its driver is too old.
        DeviceMemoryError: the GPU or `device_memory` is too small; the message gives the difference.
        CorruptionError: the files contradict each other or are truncated.
        ValueError: unknown dtype or mode, or conflicting arguments.
    """
    directory = resolve_model(directory)
    if not is_packed(directory):
        message = "not a packed directory (its config has no quantization_config of moepack); load it with transformers"
        raise LoadError(message, file=directory)
    places = device, device_map, host_memory, guess, approximate, device_memory, misses
    return open_model(directory, dtype, threads, mode, resident, *places)


def open_model(
    directory: str | PathLike[str],
    dtype: torch.dtype | str | None = None,
    threads: int | None = None,
    mode: str | None = None,
    resident: bool = False,
    device: torch.device | str | None = None,
    device_map: Mapping[str, Any] | str | None = None,
    host_memory: str | int | None = None,
    guess: bool = True,
    approximate: bool = False,
    device_memory: str | int | None = None,
    misses: Misses = "auto",
) -> Any:
    """Load a packed or an ordinary model directory. Arguments, result and errors as for `load`.

    Quantized source weights are decoded in the same way as by `compress`, on every device.
    """
    directory = resolve_model(directory)
    config = _read_config(directory)
    _refuse_absurd(config, Path(directory))
    memory, tier = (None if given is None else byte_count(given) for given in (host_memory, device_memory))
    gpu = None if tier is None else _tiered(device, resident)
    _check_misses(misses, gpu)
    places = _device_map(None if gpu else device, device_map, resident)
    if memory is not None and (resident or places is not None):
        raise ValueError("host_memory needs a model on the CPU that is not resident, or device_memory")
    if threads is not None:
        set_threads(threads)
    from moepack.integrations import register

    register()
    dtype = _dtype(dtype)
    try:
        kind, where = _class_and_source(config, Path(directory))
        model, report = kind.from_pretrained(
            **where, dtype=dtype, local_files_only=True, output_loading_info=True, device_map=places
        )
    except MoepackError:
        raise
    except Exception as error:  # model classes raise arbitrary exceptions for unexpected config values
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise LoadError(f"transformers cannot load it: {reason}", file=directory) from error
    if missing := sorted(report["missing_keys"]):
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise LoadError(f"the model needs tensors that the directory does not have: {names}", file=directory)
    if mode is not None:
        set_compute_mode(mode, model)
    if resident:
        ResidentStore().take(model, [Path(directory) / name for name in weight_files(Path(directory), LoadError)])
    if gpu is not None and tier is not None:
        keep_on(model, gpu, tier, memory, misses)
        install(model)
    elif memory is not None:
        stream(model, memory)
    if approximate or (guess and memory is not None and gpu is None):
        foresee(model, Path(directory), approximate)
    watch(model)
    carried_of(model)
    return model.eval()


def _class_and_source(config: Mapping[str, Any], directory: Path) -> tuple[Any, dict[str, Any]]:
    """Return the class that loads a directory, and the `from_pretrained` arguments that give the weights.

    The weights are the directory, or, if transformers would read it differently from `compress`, the tensors of the
    checkpoint, read one by one on demand.
    """
    source = None if _names_moepack(config) else _read_differently(config, directory)
    if source is None:
        return model_class(config), {"pretrained_model_name_or_path": fspath(directory)}
    kind, settings = model_class(source.config), configuration(directory, source.config)
    weights = {name: _Tensor(source, name) for name in source.names()}
    known = getattr(kind, "_model_mapping", {type(settings): kind})
    return known[type(settings)], {"pretrained_model_name_or_path": None, "config": settings, "state_dict": weights}


def _read_differently(config: Mapping[str, Any], directory: Path) -> Checkpoint | None:
    """Return the checkpoint if moepack reads it differently from transformers, otherwise None.

    moepack decodes quantized weights, unwraps names, and does not apply an adapter next to the weights.
    """
    source = None
    try:
        with suppress(UnsupportedModelError):  # transformers may know it
            source = open_checkpoint(directory)
    except CheckpointError as error:
        raise LoadError(error.detail, file=error.file, tensor=error.tensor) from error
    if isinstance(source, QuantizedCheckpoint):
        return source
    return source if source is not None and (source.notes or (directory / ADAPTER).is_file()) else None


class _Tensor:
    """A checkpoint tensor that is read when transformers indexes it with `[...]`."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name
        self.dtype = checkpoint.info(name).dtype

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._checkpoint.tensor(self._name)


def open_tokenizer(directory: str | PathLike[str]) -> Any:
    """Load the tokenizer of a model directory.

    Raises:
        LoadError: transformers cannot read a tokenizer there.
    """
    import transformers

    directory = resolve_model(directory)
    try:
        return transformers.AutoTokenizer.from_pretrained(fspath(directory), local_files_only=True)
    except (OSError, ValueError) as error:
        raise LoadError(f"no tokenizer can be loaded: {' '.join(str(error).split())}", file=directory) from error


def is_packed(directory: str | PathLike[str]) -> bool:
    """Return whether config.json names moepack as the quantization method.

    Raises:
        LoadError: config.json is missing or unreadable.
    """
    return _names_moepack(_read_config(directory))


def _tiered(device: torch.device | str | None, resident: bool) -> Gpu:
    """Return the GPU of a model with `device_memory`."""
    if device is None or torch.device(device).type != "cuda" or resident:
        raise ValueError('device_memory needs a model on one GPU (device="cuda") that is not resident')
    return Gpu(torch.device(device))


def _check_misses(misses: str, gpu: Gpu | None) -> None:
    if misses not in MISSES:
        raise ValueError(f"misses must be one of {', '.join(MISSES)}, got {misses!r}")
    if misses != "auto" and gpu is None:
        raise ValueError("misses needs device_memory")


def _device_map(device: torch.device | str | None, device_map: Any, resident: bool) -> Any:
    """Return the device map for transformers, or None for the CPU."""
    if device is not None and device_map is not None:
        raise ValueError("device and device_map are mutually exclusive")
    if device is not None and torch.device(device).type != "cpu":
        device_map = {"": torch.device(device)}
    if device_map is None:
        return None
    if resident:
        raise ValueError("resident weights are on the CPU; omit device and device_map")
    if find_spec("accelerate") is None:
        raise DeviceError("placing models on devices needs accelerate: pip install 'moepack[gpu]'")
    return device_map if isinstance(device_map, str) else dict(device_map)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | str:
    if dtype is None or dtype == "auto":
        return "auto"
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)} or auto, got '{dtype}'")
        return DTYPES[dtype]
    return dtype


def _refuse_absurd(config: Mapping[str, Any], directory: Path) -> None:
    """Raise a `LoadError` if config.json describes more weights than the shards can hold."""
    error = CorruptionError if _names_moepack(config) else LoadError
    files = [directory / name for name in weight_files(directory, error)]
    if _names_moepack(config) and (directory / MANIFEST).is_file():
        check_listed(files, read_manifest(directory))
    headers = [read_header(file, error) for file in files]
    if headers:
        tensors, nbytes = sum(len(header.tensors) for header in headers), sum(header.size for header in headers)
        check_config(config, tensors, nbytes, directory / "config.json", LoadError)


def _names_moepack(config: Mapping[str, Any]) -> bool:
    settings = config.get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == "moepack"


def _read_config(directory: str | PathLike[str]) -> dict[str, Any]:
    file = Path(directory) / CONFIG
    if not file.exists() and (file.parent / ADAPTER).is_file():
        message = "is a peft adapter, not a model; load its base model, then call `PeftModel.from_pretrained`"
        raise LoadError(message, file=file.parent)
    return read_json(file, LoadError)

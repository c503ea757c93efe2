"""Loading a model directory with the class, dtype and threads that running it needs.

`load` is for packed directories. `open_model` also takes ordinary checkpoints, because evaluation compares the two.
"""

from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch

from moepack.checkpoint import Checkpoint
from moepack.checkpoint.classes import configuration, model_class
from moepack.checkpoint.quantized import QuantizedCheckpoint, open_checkpoint
from moepack.checkpoint.resolve import resolve_model
from moepack.errors import CheckpointError, CorruptionError, DeviceError, LoadError, MoepackError, UnsupportedModelError
from moepack.format.directory import check_listed, read_manifest
from moepack.format.header import read_header
from moepack.format.hub import ADAPTER, CONFIG
from moepack.format.manifest import MANIFEST
from moepack.format.plausible import check_config
from moepack.format.regular import read_json
from moepack.format.weights import weight_files
from moepack.runtime.carried import carried_of
from moepack.runtime.compute import set_compute_mode
from moepack.runtime.resident import ResidentStore
from moepack.runtime.streaming import foresee, stream
from moepack.runtime.threads import set_threads
from moepack.runtime.tiers import MISSES, Gpu, Misses, keep_on
from moepack.runtime.vocabulary import watch
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

    On the CPU the experts stay in the mapped files; loading them adds next to nothing to the process's own memory. On a
    GPU packed bytes are uploaded as they are (docs/gpu.md).

    Args:
        directory: what `moepack compress` wrote, or the id of such a model on the hub (`ORGANIZATION/NAME[@REVISION]`).
        dtype: of the dense layers and activations: a torch dtype or its name; None takes the checkpoint's.
        threads: of the packed kernels and of torch, settings of the whole process; None leaves them as they are.
        mode: how this model's packed weights are multiplied: "auto" (exact for few tokens, bf16 for many), "exact" (the
            precision of float32), "bf16" (rounded to it), "int8" (activations quantized for each token and group of
            columns), or None for the mode of the process (`moepack.set_compute_mode`, MOEPACK_COMPUTE).
        resident: read all weights into the process's own memory, in huge pages (docs/performance.md says who gains).
        device: where the whole model goes: "cpu", "cuda", "cuda:1"; None means the CPU.
        device_map: where each layer goes, instead of `device`: "auto" fills the GPUs, then the CPU; or a device by the
            path of a module, as transformers takes it. Layers on the CPU are multiplied there, in the mapped files.
        host_memory: the most that the weights may take of the CPU's memory, for example "8GB" or "7.5GiB". What every
            token needs stays there; experts are read from the drive as they are chosen, and the rest of the memory
            keeps those of the last tokens (docs/offload.md). None maps the files. With `device_memory` the most that
            experts take there, in pinned memory; None keeps them all.
        guess: with `host_memory`, read ahead what the next layer is likely to want; it changes no output.
        approximate: where experts are kept by channels, let what enters the layer before decide which ones are
            computed: what was guessed is never waited for, and outputs change.
        device_memory: the most that the weights may take of the memory of `device`, a GPU; experts come from the host's
            memory as they are chosen (docs/gpu.md).
        misses: with `device_memory`: whether chosen experts that are not on the GPU are "moved" there, "computed" by
            the CPU, or shared out by measured times so that all are done soonest ("auto", docs/gpu.md).

    Returns:
        The model of the class that config.json names, such as `...ForCausalLM` or `...ForConditionalGeneration`.

    Raises:
        CheckpointError: the hub does not give the model.
        LoadError: the directory is no packed model, needs a newer moepack, is to be resident and larger than the
            available memory, or needs more than `host_memory`.
        DeviceError: the GPU cannot be used: there is none, or it or its driver is too old.
        DeviceMemoryError: the GPU, or `device_memory`, is too small; the message says by how much.
        CorruptionError: its files contradict each other or are truncated.
        ValueError: there is no such dtype or mode, or arguments exclude each other.
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
    """Load a packed or an ordinary model directory; arguments, result and errors as for `load`.

    Weights that come quantized are decoded as `compress` decodes them, whatever the machine's devices multiply.
    """
    directory = resolve_model(directory)
    config = _read_config(directory)
    _refuse_absurd(config, Path(directory))
    memory, tier = (None if given is None else byte_count(given) for given in (host_memory, device_memory))
    gpu = None if tier is None else _tiered(device, resident)
    _check_misses(misses, gpu)
    places = _device_map(None if gpu else device, device_map, resident)
    if memory is not None and (resident or places is not None):
        raise ValueError("host_memory is for models on the CPU that are not resident, or with device_memory")
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
    except Exception as error:  # whatever a class of transformers makes of values that it does not expect
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
    elif memory is not None:
        stream(model, memory)
    if approximate or (guess and memory is not None and gpu is None):
        foresee(model, Path(directory), approximate)
    watch(model)
    carried_of(model)
    return model.eval()


def _class_and_source(config: Mapping[str, Any], directory: Path) -> tuple[Any, dict[str, Any]]:
    """The class that loads a directory, and what tells it where the weights are: the directory, or, where transformers
    would not read what `compress` reads, that checkpoint's tensors, taken one by one when they are asked for."""
    source = None if _names_moepack(config) else _read_differently(config, directory)
    if source is None:
        return model_class(config), {"pretrained_model_name_or_path": fspath(directory)}
    kind, settings = model_class(source.config), configuration(directory, source.config)
    weights = {name: _Tensor(source, name) for name in source.names()}
    known = getattr(kind, "_model_mapping", {type(settings): kind})
    return known[type(settings)], {"pretrained_model_name_or_path": None, "config": settings, "state_dict": weights}


def _read_differently(config: Mapping[str, Any], directory: Path) -> Checkpoint | None:
    """The checkpoint, if moepack reads it in another way than transformers: weights that are quantized are decoded,
    names are unwrapped, and an adapter beside the weights is not applied."""
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
    """A tensor of a checkpoint, read when transformers takes all of it (`[...]`)."""

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
        LoadError: it has none that transformers can read.
    """
    import transformers

    directory = resolve_model(directory)
    try:
        return transformers.AutoTokenizer.from_pretrained(fspath(directory), local_files_only=True)
    except (OSError, ValueError) as error:
        raise LoadError(f"no tokenizer can be loaded: {' '.join(str(error).split())}", file=directory) from error


def is_packed(directory: str | PathLike[str]) -> bool:
    """Say whether a directory's config names moepack as its quantization method.

    Raises:
        LoadError: there is no readable config.
    """
    return _names_moepack(_read_config(directory))


def _tiered(device: torch.device | str | None, resident: bool) -> Gpu:
    """The GPU of which a model takes a part."""
    if device is None or torch.device(device).type != "cuda" or resident:
        raise ValueError('device_memory is for models on one GPU that are not resident: device="cuda"')
    return Gpu(torch.device(device))


def _check_misses(misses: str, gpu: Gpu | None) -> None:
    if misses not in MISSES:
        raise ValueError(f"misses is one of {', '.join(MISSES)}, not {misses!r}")
    if misses != "auto" and gpu is None:
        raise ValueError("misses is for models with device_memory")


def _device_map(device: torch.device | str | None, device_map: Any, resident: bool) -> Any:
    """What transformers takes as device map; None for the CPU."""
    if device is not None and device_map is not None:
        raise ValueError("device and device_map exclude each other")
    if device is not None and torch.device(device).type != "cpu":
        device_map = {"": torch.device(device)}
    if device_map is None:
        return None
    if resident:
        raise ValueError("resident weights are on the CPU: leave device and device_map out")
    if find_spec("accelerate") is None:
        raise DeviceError("models are placed on devices through accelerate: pip install 'moepack[gpu]'")
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
    """Hold config.json against the shards, if there are any; `LoadError` if it claims more than they can hold."""
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
        message = "is an adapter (peft) and no model; load the model that it adapts, then `PeftModel.from_pretrained`"
        raise LoadError(message, file=file.parent)
    return read_json(file, LoadError)

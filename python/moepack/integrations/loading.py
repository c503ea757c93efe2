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
from moepack.checkpoint.decoded import DecodedCheckpoint
from moepack.checkpoint.quantized import open_checkpoint
from moepack.checkpoint.resolve import resolve_model
from moepack.decoding.carried import carried_of
from moepack.decoding.prefix import set_kv_bits
from moepack.decoding.vocabulary import watch
from moepack.errors import CheckpointError, CorruptionError, DeviceError, LoadError, MoepackError, UnsupportedModelError
from moepack.format.directory import check_listed, read_manifest
from moepack.format.header import read_header
from moepack.format.hub import ADAPTER, CONFIG, GENERATION
from moepack.format.manifest import MANIFEST
from moepack.format.plausible import check_config
from moepack.format.regular import read_json
from moepack.format.weights import weight_files
from moepack.integrations.options import Directory, LoadOptions, keywords_of
from moepack.modules.foresight import foresee
from moepack.stores.resident import ResidentStore
from moepack.stores.streaming import stream
from moepack.stores.tiers import Gpu, keep_on

__all__ = ["is_packed", "load", "open_model", "open_tokenizer", "open_with"]


@keywords_of(LoadOptions)
def load(directory: Directory, options: LoadOptions) -> Any:
    """Load a packed directory as a transformers model, in evaluation mode.

        load("packed", dtype="float32", host_memory="8GB")

    On the CPU, experts stay in the mapped files, so loading adds almost no anonymous memory. On a GPU, packed bytes are
    uploaded unchanged (docs/gpu.md).

    Args:
        directory: a directory written by `moepack compress`, or the Hub id of one (`ORGANIZATION/NAME[@REVISION]`).
        **options: the fields of `moepack.LoadOptions`: `dtype`, `threads`, `mode`, `resident`, `device`, `device_map`,
            `host_memory`, `guess`, `approximate`, `device_memory`, `misses` and `kv_bits`; `help(moepack.LoadOptions)`
            describes them.

    Returns:
        The model, of the class named in config.json, such as `...ForCausalLM` or `...ForConditionalGeneration`.

    Raises:
        CheckpointError: the model cannot be downloaded from the Hub.
        LoadError: the directory is not a packed model, needs a newer moepack, does not fit in the available memory with
            `resident`, or needs more than `host_memory`.
        DeviceError: the GPU cannot be used: none is present, or the GPU or its driver is too old.
        DeviceMemoryError: the GPU or `device_memory` is too small; the message gives the memory that is missing.
        CorruptionError: the files contradict each other or are truncated.
        ValueError: unknown dtype or mode, or conflicting options.
    """
    directory = resolve_model(directory)
    if not is_packed(directory):
        message = "not a packed directory (its config has no quantization_config of moepack); load it with transformers"
        raise LoadError(message, file=directory)
    return open_with(directory, options)


@keywords_of(LoadOptions)
def open_model(directory: Directory, options: LoadOptions) -> Any:
    """Load a packed or an ordinary model directory. Arguments, result and errors as for `load`."""
    return open_with(directory, options)


def open_with(directory: Directory, options: LoadOptions) -> Any:
    """Load a packed or an ordinary model directory. Result and errors as for `load`.

    Quantized source weights are decoded in the same way as by `compress`, on every device.
    """
    directory = resolve_model(directory)
    config = _read_config(directory)
    _refuse_absurd(config, Path(directory))
    if (generation := Path(directory) / GENERATION).is_file():
        read_json(generation, LoadError)  # transformers would fail without naming it
    if options.placement is not None and find_spec("accelerate") is None:
        raise DeviceError("placing models on devices needs accelerate: pip install 'moepack[gpu]'")
    if options.threads is not None:
        set_threads(options.threads)
    gpu = None if options.device_cap is None else Gpu(torch.device(options.device or "cuda"))  # fails early
    model = _from_pretrained(config, directory, options)
    if options.mode is not None:
        set_compute_mode(options.mode, model)
    _place(model, Path(directory), gpu, options)
    watch(model)
    carried_of(model)
    if options.kv_bits is not None:
        set_kv_bits(model, options.kv_bits)
    return model.eval()


def _from_pretrained(config: Mapping[str, Any], directory: Path, options: LoadOptions) -> Any:
    """Let transformers build the model and load its weights."""
    from moepack.integrations import register

    register()
    try:
        kind, where = _class_and_source(config, Path(directory))
        model, report = kind.from_pretrained(
            **where, dtype=options.torch_dtype, local_files_only=True, output_loading_info=True,
            device_map=options.placement,
        )  # fmt: skip
    except MoepackError:
        raise
    except Exception as error:  # model classes raise arbitrary exceptions for unexpected config values
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise LoadError(f"transformers cannot load it: {reason}", file=directory) from error
    if missing := sorted(report["missing_keys"]):
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise LoadError(f"the model needs tensors that the directory does not have: {names}", file=directory)
    return model


def _place(model: Any, directory: Path, gpu: Gpu | None, options: LoadOptions) -> None:
    """Keep the weights in the memory that they may take."""
    memory, tier = options.host_cap, options.device_cap
    try:
        if options.resident:
            ResidentStore().take(model, [directory / name for name in weight_files(directory, LoadError)])
        if gpu is not None and tier is not None:
            keep_on(model, gpu, tier, memory, options.misses)
        elif memory is not None:
            stream(model, memory)
    except LoadError as error:
        raise error.at(directory) from error
    if options.approximate or (options.guess and memory is not None and gpu is None):
        foresee(model, directory, options.approximate)


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
    if isinstance(source, DecodedCheckpoint):
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
    except Exception as error:  # tokenizers raise arbitrary exceptions for damaged files
        reason = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        raise LoadError(f"no tokenizer can be loaded: {' '.join(reason.split())}", file=directory) from error


def is_packed(directory: str | PathLike[str]) -> bool:
    """Return whether config.json names moepack as the quantization method.

    Raises:
        LoadError: config.json is missing or unreadable.
    """
    return _names_moepack(_read_config(directory))


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

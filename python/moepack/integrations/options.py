"""How a model is loaded, as one value that all callers pass on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from os import PathLike
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from moepack.stores.tiers import MISSES, Misses
from moepack.units import byte_count

__all__ = ["DTYPES", "Directory", "LoadOptions", "keywords_of"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Directory = str | PathLike[str]

P = ParamSpec("P")
Options = TypeVar("Options")


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded.

    Attributes:
        dtype: dtype of dense layers and activations, a torch dtype or its name; None or "auto" uses the checkpoint's.
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
        guess: with `host_memory` on the CPU, prefetch the likely experts of the next layer. Outputs do not change.
        approximate: for experts stored by channels, select the channels with the input of the previous layer, so that
            their reads start one layer earlier. Outputs change.
        device_memory: caps the memory for weights on `device`, a GPU. Experts that do not fit are copied from RAM when
            they are chosen (docs/gpu.md).
        misses: with `device_memory`, what happens to chosen experts that are not on the GPU: "moved" copies them there,
            "computed" runs them on the CPU, "auto" splits them by measured times to finish soonest (docs/gpu.md).
        kv_bits: 8 stores keys and values in 8 bits in the caches of moepack's generation, chats and server
            (docs/serving.md); None stores them in `dtype`. `generate` of transformers makes its own cache, unless
            `past_key_values` is `moepack.decoding.prefix.new_cache(model)`.

    Raises:
        ValueError: unknown dtype, or conflicting options.
    """

    dtype: torch.dtype | str | None = None
    threads: int | None = None
    mode: str | None = None
    resident: bool = False
    device: torch.device | str | None = None
    device_map: Mapping[str, Any] | str | None = None
    host_memory: str | int | None = None
    guess: bool = True
    approximate: bool = False
    device_memory: str | int | None = None
    misses: Misses = "auto"
    kv_bits: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str) and self.dtype not in (*DTYPES, "auto"):
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)} or auto, got '{self.dtype}'")
        if self.device is not None and self.device_map is not None:
            raise ValueError("device and device_map are mutually exclusive")
        on_gpu = self.device is not None and _device(self.device).type == "cuda"
        if self.device_cap is not None and (not on_gpu or self.resident):
            raise ValueError('device_memory needs a model on one GPU (device="cuda") that is not resident')
        if self.misses not in MISSES:
            raise ValueError(f"misses must be one of {', '.join(MISSES)}, got {self.misses!r}")
        if self.misses != "auto" and self.device_cap is None:
            raise ValueError("misses needs device_memory")
        if self.resident and self.placement is not None:
            raise ValueError("resident weights are on the CPU; omit device and device_map")
        if not self.guess and (self.host_cap is None or self.device_cap is not None):
            raise ValueError("guess=False needs host_memory, and a model on the CPU")
        if self.host_cap is not None and (self.resident or self.placement is not None):
            raise ValueError("host_memory needs a model on the CPU that is not resident, or device_memory")

    @property
    def torch_dtype(self) -> torch.dtype | str:
        """The dtype for transformers: "auto" for the checkpoint's."""
        if self.dtype is None or self.dtype == "auto":
            return "auto"
        return DTYPES[self.dtype] if isinstance(self.dtype, str) else self.dtype

    @property
    def host_cap(self) -> int | None:
        """`host_memory` in bytes."""
        return None if self.host_memory is None else byte_count(self.host_memory)

    @property
    def device_cap(self) -> int | None:
        """`device_memory` in bytes."""
        return None if self.device_memory is None else byte_count(self.device_memory)

    @property
    def placement(self) -> Any:
        """The device map for transformers; None if the model is loaded on the CPU first."""
        if self.device is not None and self.device_cap is None and torch.device(self.device).type != "cpu":
            return {"": torch.device(self.device)}
        return self.device_map if self.device_map is None or isinstance(self.device_map, str) else dict(self.device_map)


def _device(name: torch.device | str) -> torch.device:
    """Return a device by its name; raises ValueError for an unknown kind."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be cpu, cuda or a GPU such as cuda:0, not '{name}'") from error


def keywords_of(
    make: Callable[P, Options],
) -> Callable[[Callable[[Directory, Options], Any]], Callable[Concatenate[Directory, P], Any]]:
    """Return a decorator that replaces a function's options object by the arguments that make it.

    The decorated function takes a directory and the fields of the options, by name or in order.
    """

    def decorate(function: Callable[[Directory, Options], Any]) -> Callable[Concatenate[Directory, P], Any]:
        @wraps(function)
        def call(directory: Directory, /, *given: P.args, **named: P.kwargs) -> Any:
            return function(directory, make(*given, **named))

        fields = [each.replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for each in signature(make).parameters.values()]
        first = signature(function).parameters["directory"]
        call.__signature__ = Signature([first, *fields], return_annotation=Any)  # type: ignore[attr-defined]
        return call

    return decorate

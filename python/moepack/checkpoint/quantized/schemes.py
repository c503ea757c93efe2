"""Which schemes a quantized checkpoint uses, from its settings."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from moepack.checkpoint.quantized.bitsandbytes import bitsandbytes
from moepack.checkpoint.quantized.float4 import mxfp4, mxfp4_packed, nvfp4, nvfp4_packed
from moepack.checkpoint.quantized.float8 import float_quantized, fp8, quark
from moepack.checkpoint.quantized.integers import awq, gptq, int8, pack_quantized
from moepack.checkpoint.quantized.scheme import Scheme, Settings, listed, require

__all__ = ["METHODS"]

Names = Collection[str]
Found = Sequence[Scheme]


def _modelopt(settings: Settings, names: Names) -> Found:
    """Return the schemes of NVIDIA ModelOpt. Checkpoints of mixed precision list an algorithm per layer."""
    inner = settings.get("quantization") or settings
    algorithm = inner.get("quant_algo")
    layers = (inner.get("quantized_layers") or {}).values() if algorithm == "MIXED_PRECISION" else ()
    algorithms = {layer.get("quant_algo") for layer in layers} or {algorithm}
    unknown = algorithms - _MODELOPT.keys()
    require(
        not unknown, f"quant_algo {listed([repr(each) for each in unknown])}; only {listed(_MODELOPT)} are supported"
    )
    makers = {_MODELOPT[each] for each in algorithms}
    return [make(names) for make in (_nvfp4, _float8) if make in makers]


def _nvfp4(_: Names) -> Scheme:
    return nvfp4()


def _float8(names: Names) -> Scheme:
    return fp8({}, names)


_MODELOPT = {"NVFP4": _nvfp4, "FP8": _float8, "FP8_PER_CHANNEL_PER_TOKEN": _float8}


MIXED, NAIVE = _OTHERS = ("mixed-precision", "naive-quantized")
"""Formats of compressed-tensors that the groups determine."""


def _compressed_tensors(settings: Settings, names: Names) -> Found:
    """Return the schemes of compressed-tensors, one for each format of its groups."""
    whole = settings.get("format")
    formats: dict[str, list[Settings]] = {}
    require(whole in (*_FORMATS, *_OTHERS), f"format {whole!r}; only {listed((*_FORMATS, *_OTHERS))} are supported")
    for group in settings["config_groups"].values():
        own, scheme = group.get("format") if whole == MIXED else whole, group["weights"]
        if own == NAIVE:
            own = "float-quantized" if scheme.get("type") == "float" else "int-quantized"
        require(own in _FORMATS, f"format {own!r}; only {listed(_FORMATS)} are supported")
        kind, bits = _FORMATS[own]
        known = (scheme.get("type") or "int") == kind and scheme["num_bits"] in bits
        found = f"{scheme['num_bits']}-bit numbers of type {scheme.get('type')!r} in groups of {own}"
        require(known, f"{found}; only {kind} of {' or '.join(map(str, bits))} bits are supported")
        formats.setdefault(str(own), []).append(group)
    makers: dict[str, Callable[[Sequence[Settings]], Found]] = {
        "nvfp4-pack-quantized": lambda _: [nvfp4_packed()],
        "mxfp4-pack-quantized": lambda _: [mxfp4_packed()],
        "int-quantized": lambda _: [int8()],
        "pack-quantized": pack_quantized,
        "float-quantized": lambda groups: [float_quantized([group["weights"] for group in groups])],
    }
    require(not {"nvfp4-pack-quantized", "mxfp4-pack-quantized"} <= formats.keys(), "both NVFP4 and MXFP4")
    return [scheme for name, make in makers.items() if name in formats for scheme in make(formats[name])]


_FORMATS: Mapping[Any, tuple[str, tuple[int, ...]]] = {
    "pack-quantized": ("int", (4, 8)),
    "int-quantized": ("int", (8,)),
    "float-quantized": ("float", (8,)),
    "nvfp4-pack-quantized": ("float", (4,)),
    "mxfp4-pack-quantized": ("float", (4,)),
}
"""The formats of compressed-tensors: type and bits of the numbers."""


def _only(make: Callable[[Settings, Names], Scheme]) -> Callable[[Settings, Names], Found]:
    return lambda settings, names: [make(settings, names)]


METHODS: Mapping[str, Callable[[Settings, Names], Found]] = {
    "fp8": _only(fp8),
    "fbgemm_fp8": _only(fp8),
    "modelopt": _modelopt,
    "quark": _only(quark),
    "mxfp4": _only(mxfp4),
    "compressed-tensors": _compressed_tensors,
    "gptq": _only(gptq),
    "awq": _only(awq),
    "bitsandbytes": _only(bitsandbytes),
}
"""By `quant_method`: returns the schemes from settings and tensor names. The more specific come first.

They raise KeyError, TypeError or ValueError for settings that are not supported.
"""

"""Codes of 8-bit floating-point numbers (float8_e4m3fn): fp8, fbgemm_fp8, ModelOpt, Quark, compressed-tensors."""

from collections.abc import Collection
from math import prod

import torch

from moepack.checkpoint.quantized.scheme import Scheme, Settings, Shapes, Tensors, listed, require

__all__ = ["float8", "float_quantized", "fp8", "quark"]


def fp8(settings: Settings, names: Collection[str]) -> Scheme:
    """The scheme of DeepSeek-V3 (section 3.3 of its report), transformers and fbgemm."""
    block = settings.get("weight_block_size")
    end = "_scale_inv" if any(name.endswith("_scale_inv") for name in names) else "_scale"
    return float8(end, None if block is None else (int(block[0]), int(block[1])))


def quark(settings: Settings, names: Collection[str]) -> Scheme:
    """The fp8 schemes of AMD Quark."""
    weight = (settings.get("global_quant_config") or {}).get("weight") or {}
    found = weight.get("dtype"), weight.get("qscheme")
    require(
        found[0] == "fp8_e4m3" and found[1] in ("per_tensor", "per_channel"),
        f"weights of dtype {found[0]!r} and qscheme {found[1]!r}; only fp8_e4m3 per_tensor and per_channel are "
        "supported",
    )
    return fp8({}, names)


def float_quantized(schemes: Collection[Settings]) -> Scheme:
    """The fp8 scheme of compressed-tensors, from the weights' settings of its groups."""
    blocks = {tuple(scheme.get("block_structure") or ()) for scheme in schemes}
    require(len(blocks) == 1, f"blocks of several sizes: {listed(blocks)}")
    block = next(iter(blocks))
    return float8("_scale", (int(block[0]), int(block[1])) if block else None)


def float8(end: str, block: tuple[int, int] | None) -> Scheme:
    """Return the scheme of float8_e4m3fn codes, of a matrix or of stacked experts.

    There is one scale per block; without blocks, one per row, expert or tensor. Transposed stacked experts may have one
    scale per column.
    """

    def shape(shapes: Shapes) -> tuple[int, ...]:
        found, scales = shapes[""], shapes[end]
        require(len(found) in (2, 3), "matrix")
        lead, (rows, columns) = found[:-2], found[-2:]
        if block is not None:
            require(scales == (*lead, -(-rows // block[0]), -(-columns // block[1])), "blocks")
        elif prod(scales) != 1:
            stacked = [(*lead, 1, columns), (*lead, 1, 1), lead] if lead else []
            require(scales in [(*lead, rows, 1), (*lead, rows), *stacked], "rows")
        return found

    def values(tensors: Tensors) -> torch.Tensor:
        codes, scales = tensors[""].float(), tensors[end].float()
        if scales.numel() == 1:
            return codes * scales.reshape(())
        if block is not None:
            rows = scales.repeat_interleave(block[0], -2)[..., : codes.shape[-2], :]
            return codes * rows.repeat_interleave(block[1], -1)[..., : codes.shape[-1]]
        while scales.ndim < codes.ndim:
            scales = scales.unsqueeze(-1)
        return codes * scales

    return Scheme("", (end,), "", shape, values, stacked=True, dtype=torch.float8_e4m3fn)

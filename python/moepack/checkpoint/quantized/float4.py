"""Codes of 4-bit floating-point numbers (E2M1): MXFP4 (OCP Microscaling Formats 1.0) and NVFP4."""

from collections.abc import Callable, Collection

import torch

from moepack.checkpoint.quantized.scheme import Scheme, Settings, Shapes, Tensors, require, spread

__all__ = ["mxfp4", "mxfp4_packed", "nvfp4", "nvfp4_packed"]

_VALUES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _decoded(codes: torch.Tensor) -> torch.Tensor:
    """Decode two values per byte, low bits first: shape (..., B) uint8 to (..., 2 B) float32."""
    pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    values: torch.Tensor = _VALUES[pairs.long()]
    return values


def mxfp4(settings: Settings, names: Collection[str]) -> Scheme:
    """The scheme of gpt-oss: stacked experts, transposed, with groups of 32 values that share an exponent."""

    def shape(shapes: Shapes) -> tuple[int, ...]:
        experts, rows, count, width = shapes["_blocks"]
        require(shapes["_scales"] == (experts, rows, count), "groups")
        return experts, count * width * 2, rows

    def values(tensors: Tensors) -> torch.Tensor:
        exponents = tensors["_scales"].to(torch.int32) - 127
        decoded: torch.Tensor = torch.ldexp(_decoded(tensors["_blocks"]), exponents.unsqueeze(-1)).flatten(-2)
        return decoded.mT

    return Scheme("_blocks", ("_scales",), "", shape, values, stacked=True)


def _grouped(codes: tuple[int, ...], scales: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Return the shape of a weight, after checking that each row has one scale per `width` columns."""
    require(len(codes) == 2, "matrix")
    rows, columns = codes[0], 2 * codes[1]
    require(scales == (rows, columns // width) and columns % width == 0, "groups")
    return rows, columns


def mxfp4_packed() -> Scheme:
    """The scheme `mxfp4-pack-quantized` of compressed-tensors."""

    def shape(shapes: Shapes) -> tuple[int, ...]:
        return _grouped(shapes["weight_packed"], shapes["weight_scale"], 32)

    def values(tensors: Tensors) -> torch.Tensor:
        decoded = _decoded(tensors["weight_packed"])
        return torch.ldexp(decoded, spread(tensors["weight_scale"].to(torch.int32) - 127, decoded.shape[-1]))

    return Scheme("weight_packed", ("weight_scale",), "weight", shape, values, dtype=torch.uint8)


def nvfp4_packed() -> Scheme:
    """The scheme `nvfp4-pack-quantized` of compressed-tensors: scales are divided by that of the tensor."""
    return _nvfp4("weight_packed", "weight_global_scale", lambda scales, whole: scales / whole)


def nvfp4() -> Scheme:
    """The scheme NVFP4 of ModelOpt: scales are multiplied by that of the tensor."""
    return _nvfp4("weight", "weight_scale_2", lambda scales, whole: scales * whole)


def _nvfp4(codes: str, whole: str, scaled: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Scheme:
    """Return the scheme of groups of 16 values with a float8 scale each, and one scale per tensor."""

    def shape(shapes: Shapes) -> tuple[int, ...]:
        require(shapes[whole] in ((), (1,)), "scale of the tensor")
        return _grouped(shapes[codes], shapes["weight_scale"], 16)

    def values(tensors: Tensors) -> torch.Tensor:
        decoded = _decoded(tensors[codes])
        scales = scaled(tensors["weight_scale"].float(), tensors[whole].float().reshape(()))
        return decoded * spread(scales, decoded.shape[-1])

    return Scheme(codes, ("weight_scale", whole), "weight", shape, values, dtype=torch.uint8)

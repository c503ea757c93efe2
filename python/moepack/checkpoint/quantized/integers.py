"""Integer codes: gptq (arXiv 2210.17323), awq (arXiv 2306.00978), and the integers of compressed-tensors."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from moepack.checkpoint.quantized.scheme import Scheme, Settings, Shapes, Tensors, groups, require, unpacked

__all__ = ["awq", "gptq", "int8", "pack_quantized"]


def pack_quantized(found: Sequence[Settings]) -> list[Scheme]:
    """Return the scheme `pack-quantized` of compressed-tensors for each width of the groups that were found.

    With several widths, a weight has the width of the group whose targets match its module: its path, exactly or as a
    regular expression, before its class (here always `Linear`).
    """
    widths = sorted({group["weights"]["num_bits"] for group in found})
    if len(widths) == 1:
        return [_packed(widths[0])]
    targets = [(target, group["weights"]["num_bits"]) for group in found for target in group["targets"]]
    require(all(isinstance(target, str) for target, _ in targets), "targets that are not text")
    try:
        patterns = [(re.compile(target[3:]), bits) for target, bits in targets if target.startswith("re:")]
    except re.error as error:
        raise ValueError(f"a target that is no regular expression: {error}") from error
    exact = dict(reversed(targets))

    def width(path: str) -> int | None:
        matched = (bits for pattern, bits in patterns if pattern.match(path))
        return exact.get(path) or next(matched, exact.get("Linear"))

    def of(bits: int) -> Callable[[str], bool]:
        return lambda path: width(path) == bits

    return [replace(_packed(bits), selects=of(bits)) for bits in widths]


def _packed(width: int) -> Scheme:
    """Codes in words, and zero points packed along the rows."""
    zeros, order = "weight_zero_point", "weight_g_idx"

    def shape(shapes: Shapes) -> tuple[int, ...]:
        (rows, words), (scaled, count) = shapes["weight_packed"], shapes["weight_scale"]
        columns = words * 32 // width
        require(rows == scaled and count > 0 and columns % count == 0, "groups")
        require(shapes.get(zeros, (-(-rows * width // 32), count)) == (-(-rows * width // 32), count), "zero points")
        require(shapes.get(order, (columns,)) == (columns,), "order of columns")
        return rows, columns

    def values(tensors: Tensors) -> torch.Tensor:
        codes, scales = unpacked(tensors["weight_packed"], width), tensors["weight_scale"].float()
        group = tensors[order].long() if order in tensors else groups(codes.shape[1], scales.shape[1])
        zero = torch.tensor([[1 << width - 1]], dtype=torch.int32)
        if zeros in tensors:
            zero = unpacked(tensors[zeros].mT.contiguous(), width).mT[: len(codes), group]
        return (codes - zero).float() * scales[:, group]

    others = ("weight_scale", "weight_shape", zeros, order)
    return Scheme("weight_packed", others, "weight", shape, values, optional=others[1:], dtype=torch.int32)


def int8() -> Scheme:
    """The scheme `int-quantized` of compressed-tensors (W8A8): one scale per tensor, row, or group of columns."""
    scale, zeros = "weight_scale", "weight_zero_point"

    def shape(shapes: Shapes) -> tuple[int, ...]:
        found, scales = shapes["weight"], shapes[scale]
        require(len(found) == 2, "matrix")
        rows, columns = found
        grouped = len(scales) == 2 and scales[0] == rows and scales[1] > 0 and columns % scales[1] == 0
        require(grouped or scales in ((), (1,), (rows,)), "groups")
        require(shapes.get(zeros, scales) == scales, "zero points")
        return found

    def values(tensors: Tensors) -> torch.Tensor:
        codes = tensors["weight"].float()
        if zeros in tensors:
            codes = codes - _by_columns(tensors[zeros].float(), codes)
        return codes * _by_columns(tensors[scale].float(), codes)

    return Scheme("weight", (scale, zeros), "weight", shape, values, optional=(zeros,), dtype=torch.int8)


def _by_columns(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return scales or zero points in a shape that broadcasts to that of the codes."""
    if values.numel() == 1:
        return values.reshape(())
    grouped = values.reshape(len(codes), -1)
    return grouped if grouped.shape[1] == 1 else grouped.repeat_interleave(codes.shape[1] // grouped.shape[1], 1)


def _grouped_shape(
    codes: tuple[int, ...], scales: tuple[int, ...], zeros: tuple[int, ...], bits: int
) -> tuple[int, ...]:
    """Return the weight shape (R, C) of gptq and awq from the shape (C, R) of the codes."""
    columns, rows = codes
    require(scales[1] == rows and zeros == (scales[0], rows * bits // 32) and columns % scales[0] == 0, "groups")
    return rows, columns


def gptq(settings: Settings, names: Collection[str]) -> Scheme:
    """The scheme of GPTQ libraries. Version 1 stores zero points minus one."""
    bits = settings.get("bits")
    require(bits in (2, 4, 8), f"{bits} bits; only 2, 4 and 8 are supported")
    assert isinstance(bits, int)
    one = int(settings.get("checkpoint_format", "gptq") == "gptq")

    def shape(shapes: Shapes) -> tuple[int, ...]:
        words, rows = shapes["qweight"]
        return _grouped_shape((words * 32 // bits, rows), shapes["scales"], shapes["qzeros"], bits)

    def values(tensors: Tensors) -> torch.Tensor:
        codes, scales = unpacked(tensors["qweight"].mT.contiguous(), bits), tensors["scales"].float()
        zeros = unpacked(tensors["qzeros"], bits) + one
        group = tensors["g_idx"].long() if "g_idx" in tensors else groups(codes.shape[1], len(scales))
        return (codes - zeros[group].mT).float() * scales[group].mT

    return Scheme("qweight", ("scales", "qzeros", "g_idx"), "weight", shape, values, optional=("g_idx",))


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of each of its eight rows."""


def awq(settings: Settings, names: Collection[str]) -> Scheme:
    """The scheme of AWQ, version "gemm"."""
    require(settings.get("bits") == 4, f"{settings.get('bits')} bits; only 4 are supported")
    version = settings.get("version", "gemm")
    require(str(version).lower() == "gemm", f"version {version!r}; only 'gemm' is supported")

    def shape(shapes: Shapes) -> tuple[int, ...]:
        columns, words = shapes["qweight"]
        return _grouped_shape((columns, 8 * words), shapes["scales"], shapes["qzeros"], 4)

    def values(tensors: Tensors) -> torch.Tensor:
        codes, zeros = (_in_order(unpacked(tensors[end], 4)) for end in ("qweight", "qzeros"))
        group = groups(len(codes), len(zeros))
        return ((codes - zeros[group]).float() * tensors["scales"].float()[group]).mT

    return Scheme("qweight", ("scales", "qzeros"), "weight", shape, values)


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(len(codes), -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1)

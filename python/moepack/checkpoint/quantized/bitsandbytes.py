"""The codes of bitsandbytes: 4-bit entries of a table (QLoRA, arXiv 2305.14314) and 8-bit integers of rows.

A 4-bit weight is a flat array of two codes per byte, high bits first. A block of values shares a scale. With double
quantization, scales are 8-bit entries of a second table, in blocks with a scale each, plus an offset. A JSON text
beside them holds the shape.
"""

import json
from math import prod
from typing import Any

import torch

from moepack.checkpoint.quantized.scheme import Scheme, Settings, Shapes, Tensors, require

__all__ = ["bitsandbytes"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.bfloat16}


def bitsandbytes(settings: Settings, _: object) -> Scheme:
    """The scheme of a checkpoint that transformers saved."""
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        return _rows()
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    require(kind in ("nf4", "fp4"), f"bnb_4bit_quant_type {kind!r}; only nf4 and fp4 are supported")
    return _table(f"weight.quant_state.bitsandbytes__{kind}")


def _rows() -> Scheme:
    """Return the scheme of LLM.int8: 127 stands for the largest absolute value of the row."""

    def shape(shapes: Shapes) -> tuple[int, ...]:
        require(len(shapes["weight"]) == 2 and shapes["SCB"] == shapes["weight"][:1], "rows")
        return shapes["weight"]

    def values(tensors: Tensors) -> torch.Tensor:
        return tensors["weight"].float() * (tensors["SCB"].float() / 127).unsqueeze(1)

    others = ("SCB", "weight_format")
    return Scheme("weight", others, "weight", shape, values, optional=others[1:], dtype=torch.int8)


def _table(state: str) -> Scheme:
    """Return the scheme of 4-bit codes, whose state is the tensor with the suffix `state`."""
    nested = ("weight.nested_absmax", "weight.nested_quant_map")

    def shape(shapes: Shapes) -> tuple[int, ...]:
        require(len(shapes["weight"]) <= 2 and shapes["weight.quant_map"] == (16,), "codes")
        require((nested[0] in shapes) == (nested[1] in shapes), "scales of scales")
        return shapes["weight"]

    def values(tensors: Tensors) -> torch.Tensor:
        known = json.loads(tensors[state].numpy().tobytes())
        scales = tensors["weight.absmax"]
        if nested[0] in tensors:
            table, wide = tensors[nested[1]].float(), _repeated(tensors[nested[0]], known["nested_blocksize"], scales)
            scales = table[scales.long()] * wide + float(known["nested_offset"])
        packed = tensors["weight"].reshape(-1)
        codes = torch.stack((packed >> 4, packed & 15), -1).flatten()[: prod(known["shape"])]
        flat = tensors["weight.quant_map"].float()[codes.long()]
        return (flat * _repeated(scales, known["blocksize"], flat)).view(known["shape"])

    others = ("weight.absmax", "weight.quant_map", *nested, state)
    return Scheme(
        *("weight", others, "weight", shape, values),
        optional=nested,
        dtype=torch.uint8,
        state=state,
        described=_described,
    )


def _repeated(scales: torch.Tensor, block: int, values: torch.Tensor) -> torch.Tensor:
    """Return the scale of each value."""
    return scales.float().repeat_interleave(block)[: len(values)]


def _described(known: dict[str, Any], shapes: Shapes) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a weight, after checking all entries of its state that are used."""
    shape, dtype, sizes = known.get("shape"), known.get("dtype"), [known.get("blocksize")]
    if not (isinstance(dtype, str) and dtype in _DTYPES and isinstance(shape, list)):
        raise ValueError("shape and dtype")
    nested = "weight.nested_absmax" in shapes
    if nested:
        sizes.append(known.get("nested_blocksize"))
        require(isinstance(known.get("nested_offset"), int | float), "offset of scales")
    require(all(isinstance(size, int) and 0 < size < 1 << 40 for size in (*shape, *sizes)), "sizes")
    scales = -(-prod(shape) // known["blocksize"])
    require(prod(shapes["weight"]) == -(-prod(shape) // 2) and shapes["weight.absmax"] == (scales,), "blocks")
    require(
        not nested or shapes["weight.nested_absmax"] == (-(-scales // known["nested_blocksize"]),), "blocks of scales"
    )
    return tuple(shape), _DTYPES[dtype]

"""Baselines for packed weights on a GPU: bfloat16 in torch, torch's int4, kernels of other projects."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Any]
GROUP = 64


def linear(rows: int, columns: int) -> dict[str, tuple[int, Callable[[], Product]]]:
    """Bytes and constructor of each peer's product with a random matrix."""
    weights = rows * columns
    found: dict[str, tuple[int, Callable[[], Product]]] = {"bf16": (2 * weights, lambda: _bf16(rows, columns))}
    if columns % 1024 == 0 and rows % 8 == 0:
        found["torch int4"] = (weights // 2, lambda: _torch_int4(rows, columns))
    if find_spec("humming"):
        for bits in (3, 4):
            found[f"humming int{bits}"] = (weights * bits // 8, partial(_humming, rows, columns, bits))
    return found


def _bf16(rows: int, columns: int) -> Product:
    weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return lambda x: functional.linear(x, weight)


def _torch_int4(rows: int, columns: int) -> Product:
    codes = torch.randint(0, 256, (rows, columns // 2), device="cuda", dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.rand(columns // GROUP, rows, 2, device="cuda", dtype=torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales)


def _humming(rows: int, columns: int, bits: int) -> Product:
    """Symmetric integers by humming-kernels, which needs nvcc to compile."""
    make = import_module("humming.layer").HummingLayer
    configuration = {"dtype": f"int{bits}", "group_size": GROUP}
    layer = make(shape_n=rows, shape_k=columns, weight_config=configuration, torch_dtype=torch.bfloat16).cuda()
    layer.load_from_unquantized(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16))
    layer.transform()
    product: Product = layer
    return product


def experts(count: int, outer: int, inner: int) -> tuple[Tensor, Tensor]:
    """Random gate and up projections together, and down projections, in bfloat16."""
    both = torch.randn(count, 2 * inner, outer, device="cuda", dtype=torch.bfloat16) * outer**-0.5
    down = torch.randn(count, outer, inner, device="cuda", dtype=torch.bfloat16) * inner**-0.5
    return both, down


def grouped_layer(both: Tensor, down: Tensor, x: Tensor, index: Tensor, scales: Tensor) -> Tensor:
    """A layer as in transformers: slots sorted by expert, two grouped products, sums of a token's outputs."""
    tokens, top_k = index.shape
    order = index.flatten().argsort(stable=True)
    counts = torch.histc(index.flatten().float(), both.shape[0], 0, both.shape[0] - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    hidden = torch._grouped_mm(x[order // top_k], both.transpose(1, 2), offs=ends)
    gate, up = hidden.chunk(2, dim=-1)
    out = torch._grouped_mm(functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
    out = out * scales.flatten()[order].unsqueeze(-1).to(out.dtype)
    return torch.empty_like(out).index_copy_(0, order, out).view(tokens, top_k, -1).sum(1)

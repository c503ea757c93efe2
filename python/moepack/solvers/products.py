"""Float32 matrix products of calibration and solvers, run by oneDNN.

Torch passes float32 products on a CPU to MKL, which does not use AVX-512 on processors of other vendors: oneDNN is 2.2
times as fast on a Zen 5, with the same precision. Torch uses oneDNN if products may be rounded to bfloat16. Only
processors with AMX then round their inputs, as bfloat16 models do themselves. Sums are float32 everywhere.

oneDNN compiles a kernel for each shape and keeps it with its buffers, 0.3 to 2 MB. So only large products of few
different shapes use it: the rows of others are filled up with zeros to a multiple of `ROWS`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["ROWS", "fast_products", "filled", "product"]

ROWS, WORK = 256, 1 << 30
"""Rows to whose multiples matrices are filled up, and multiplications from which a product gains more time than the
memory is worth."""

_lock, _users, _before = threading.Lock(), 0, ""


@contextmanager
def fast_products(work: int) -> Iterator[None]:
    """Run float32 products on the CPU by oneDNN if the largest has at least `WORK` multiplications.

    The setting belongs to the process. It is restored when the last user leaves. Versions of torch before 2.9 cannot
    set it for the CPU alone, and keep MKL.
    """
    global _users, _before
    setting: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if work < WORK or not hasattr(setting, "fp32_precision"):
        yield
        return
    with _lock:
        if not _users:
            _before, setting.fp32_precision = setting.fp32_precision, "bf16"
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                setting.fp32_precision = _before


def filled(rows: Tensor, work: int) -> Tensor:
    """Return rows [n, C] followed by zeros up to a multiple of `ROWS` if their product has `WORK` multiplications."""
    missing = -len(rows) % ROWS
    if work < WORK or not missing or rows.device.type != "cpu":
        return rows
    return functional.pad(rows, (0, 0, 0, missing))


def product(rows: Tensor, weights: Tensor) -> Tensor:
    """Return rows [n, C] times the transpose of weights [R, C], for any n."""
    work = len(rows) * weights.numel()
    with fast_products(work):
        given = filled(rows, work)
        found = given @ weights.T
    return found if given is rows else found[: len(rows)]

"""Float32 matrix products of calibration and solvers, run by oneDNN.

Torch passes float32 products on a CPU to MKL, which does not use AVX-512 on processors of other vendors: oneDNN is 2.2
times as fast on a Zen 5, with the same precision. Torch uses oneDNN if products may be rounded to bfloat16. Only
processors with AMX then round their inputs, as bfloat16 models do themselves. Sums are float32 everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["fast_products"]

_lock, _users, _before = threading.Lock(), 0, ""


@contextmanager
def fast_products() -> Iterator[None]:
    """Run float32 products on the CPU by oneDNN; also a decorator.

    The setting belongs to the process. It is restored when the last user leaves. Versions of torch before 2.9 cannot
    set it for the CPU alone, and keep MKL.
    """
    global _users, _before
    setting: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if not hasattr(setting, "fp32_precision"):
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

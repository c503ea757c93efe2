"""The dtype that torch gives to new tensors, which a program may have set to that of its model.

Invariant: public functions compute the same with any setting. Those that make tensors are decorated with
`single_precision()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["single_precision"]


@contextmanager
def single_precision() -> Iterator[None]:
    """Let torch make float32 tensors in the block or the decorated function. The setting belongs to the process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

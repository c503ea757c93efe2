"""The dtype that torch gives to new tensors, which a program may have set to that of its model.

Invariant: public functions compute the same with any setting. Those that make tensors are decorated with
`single_precision()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

__all__ = ["single_precision"]


_lock = Lock()
_blocks, _before = 0, torch.float32
"""The blocks that run, and the setting before the first of them."""


@contextmanager
def single_precision() -> Iterator[None]:
    """Let torch make float32 tensors in the block or the decorated function.

    The setting belongs to the process: blocks may run in several threads at once, and the last one to end restores it.
    """
    global _blocks, _before
    with _lock:
        if _blocks == 0:
            _before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                torch.set_default_dtype(_before)

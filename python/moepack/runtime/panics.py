"""Panics of Rust code, of tokenizers and of the core.

They reach Python as a `BaseException` that is no `Exception`, so a handler of failures would let them pass and a thread
would end.
"""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["contained"]


@contextmanager
def contained() -> Iterator[None]:
    """Turn a panic into a `RuntimeError`; anything else passes."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error

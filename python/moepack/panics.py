"""Converts Rust panics, in tokenizers and in the core, to exceptions.

Panics reach Python as a `BaseException` that is not an `Exception`. Error handlers would not catch them, and a thread
would terminate.
"""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["contained"]


@contextmanager
def contained() -> Iterator[None]:
    """Convert a panic to a `RuntimeError`; other exceptions pass."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error

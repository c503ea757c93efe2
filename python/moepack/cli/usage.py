"""Arguments that make no sense, which only the code that they are for can tell."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from moepack.errors import MoepackError

__all__ = ["wrong_usage"]


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Turn a `ValueError` into one line and the exit code of wrong usage; a `MoepackError` stays what it is."""
    try:
        yield
    except MoepackError:
        raise
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error

"""Arguments that make no sense, which only the code that they are for can tell."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from moepack.errors import MoepackError, TextError

__all__ = ["require_place", "wrong_usage"]


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Turn a `ValueError` into one line and the exit code of wrong usage.

    A `MoepackError` stays what it is, except for a `TextError`: the user has given a file that is not text.
    """
    try:
        yield
    except TextError as error:
        raise _refused(error) from error
    except MoepackError:
        raise
    except ValueError as error:
        raise _refused(error) from error


def require_place(file: Path | None) -> None:
    """Raise a `ValueError` where a file that is written after the work cannot be: its folder does not exist."""
    if file is not None and not file.parent.is_dir():
        raise ValueError(f"{file}: there is no folder {file.parent}")


def _refused(error: ValueError) -> typer.Exit:
    print(f"error: {error}", file=sys.stderr)
    return typer.Exit(2)

"""Usage errors that only the called code can detect."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from moepack.errors import MoepackError, TextError

__all__ = ["require_place", "wrong_usage"]


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Report a `ValueError` in one line and exit with the code for wrong usage.

    A `MoepackError` propagates unchanged, except a `TextError`, which means that the user passed a file without text.
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
    """Raise a `ValueError` if the folder of an output file does not exist. Call before the work starts."""
    if file is not None and not file.parent.is_dir():
        raise ValueError(f"{file}: there is no folder {file.parent}")


def _refused(error: ValueError) -> typer.Exit:
    print(f"error: {error}", file=sys.stderr)
    return typer.Exit(2)

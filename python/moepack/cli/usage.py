"""Arguments that make no sense, which only the code that they are for can tell."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from moepack.errors import MoepackError

__all__ = ["wrong_usage"]


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Make wrong usage of a `ValueError`; one that is a foreseen failure (`MoepackError`) stays what it is."""
    try:
        yield
    except MoepackError:
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

"""The console for tables and progress.

Paths, names and settings contain brackets and colons, which Rich must print literally and not parse as markup.
"""

from typing import Any

from rich.console import Console

__all__ = ["plain_console"]


def plain_console(stderr: bool = False, **options: Any) -> Console:
    """Return a console that prints all text literally; `options` go to `rich.console.Console`."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, **options)

"""Where commands print tables and progress.

Paths, names and settings contain brackets and colons. Rich must print them as they are and not read them as markup.
"""

from typing import Any

from rich.console import Console

__all__ = ["plain_console"]


def plain_console(stderr: bool = False, **options: Any) -> Console:
    """Return a console that prints every text literally; `options` go to Rich's console."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, **options)

"""Commands whose help is printed literally.

Typer parses help as Rich markup, which would drop `[ray]` as a style. The texts are escaped once, when the command is
created.
"""

from typing import Any

from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

__all__ = ["LiteralCommand", "LiteralGroup"]


class LiteralCommand(TyperCommand):
    """A command whose help may contain brackets."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _escape_help(self)


class LiteralGroup(TyperGroup):
    """A group of commands whose help may contain brackets."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _escape_help(self)


def _escape_help(command: Any) -> None:
    """Escape the help of a command and its options, unless typer prints plain text (`TYPER_USE_RICH=0`)."""
    if command.rich_markup_mode != "rich":
        return
    for item, field in ((command, "help"), (command, "epilog"), *((option, "help") for option in command.params)):
        if text := getattr(item, field, None):
            setattr(item, field, escape(text))

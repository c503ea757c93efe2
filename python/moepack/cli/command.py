"""Rebuilds the command line of a running command, with absolute paths, so that it can be run elsewhere."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

__all__ = ["command_line"]


def command_line(context: typer.Context, without: set[str]) -> list[str]:
    """Return the command with the options given on its command line.

    Args:
        context: the context of the command.
        without: names of parameters to leave out.
    """
    parts = [sys.executable, "-m", "moepack", str(context.info_name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in without:
            parts += _arguments(parameter, context.params[name])
    return parts


def _arguments(parameter: Any, value: Any) -> Iterator[str]:
    option = parameter.opts[0]
    if isinstance(value, bool):
        yield option if value else parameter.secondary_opts[0]
        return
    for one in value if isinstance(value, list | tuple) else [value]:
        text = str(one.absolute()) if isinstance(one, Path) and one.exists() else str(one)
        if parameter.param_type_name == "argument":
            yield text
        else:
            yield f"{option}={text}"

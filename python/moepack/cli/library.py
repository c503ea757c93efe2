"""`moepack list` and `moepack remove`: the packed models that `moepack run` keeps."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from moepack.cli.usage import wrong_usage
from moepack.memory import importing
from moepack.units import size

__all__ = ["list_command", "remove_command"]


def list_command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the packed models that `moepack run` keeps, with their sizes on disk."""
    with importing():
        from moepack.pipeline.library import entries, library

    found = entries()
    if as_json:
        print(json.dumps([{**asdict(entry), "path": str(entry.path)} for entry in found], indent=2))
        return
    for entry in found:
        state = "" if entry.complete else "  (unfinished: the same `moepack run` continues)"
        print(f"{entry.title}  {entry.size}  {size(entry.nbytes)} on disk  {entry.path}{state}")
    if not found:
        print(f"no models in {library()}")


def remove_command(
    model: Annotated[str, typer.Argument(help="A model as `moepack list` shows it.")],
    only: Annotated[str | None, typer.Option("--size", help="Remove only this size; default: all sizes.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a packed model that `moepack run` keeps. Models elsewhere and the Hub's cache are never touched."""
    with importing():
        from moepack.pipeline.library import entries, title_of

    with wrong_usage():
        found = [each for each in entries() if each.title in (model, title_of(model)) and only in (None, each.size)]
        if not found:
            known = ", ".join(f"{each.title} ({each.size})" for each in entries()) or "none"
            raise ValueError(f"there is no packed model {model!r}{f' of {only}' if only else ''}; available: {known}")
    for entry in found:
        if yes or typer.confirm(f"delete {entry.path} ({size(entry.nbytes)})?"):
            entry.remove()
            print(f"deleted {entry.path}")

"""`moepack doctor`: the features of this machine and how moepack uses them."""

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from moepack.cli.console import plain_console
from moepack.memory import importing

__all__ = ["doctor_command"]


def doctor_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model directory or Hub id: also show whether moepack's decoder or transformers decodes it, and why."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, instruction sets, the kernel of each format, decoding, huge pages, GPU and memory bandwidth.

    With MODEL, show only what decodes that model.
    """
    with importing():
        from moepack.backends.machine import examine

    if model is not None:
        with importing():
            from moepack.integrations.diagnosis import who_decodes

        answer = who_decodes(model)
        print(json.dumps({"decodes": answer}) if as_json else f"{model} is {answer}")
        return
    facts = examine() | {"decoding": _decoding()}
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    table = Table(show_header=False, box=None)
    for section, content in facts.items():
        for label, value in _rows(section, content):
            table.add_row(label, value)
    plain_console().print(table)


def _decoding() -> dict[str, str]:
    """Return the families that moepack's decoder supports with the installed transformers, and why not the others."""
    with importing():
        from moepack.census import core_decodes
        from moepack.cli.evaluate import quiet_transformers

    quiet_transformers()
    found = core_decodes()
    others = {family: answer for family, answer in found.items() if answer != "decoded by moepack's decoder"}
    return {"by moepack's decoder": ", ".join(family for family in found if family not in others) or "-"} | others


def _rows(section: str, content: Any) -> list[tuple[str, str]]:
    """Return one (label, value) row per fact of a section."""
    if not isinstance(content, dict):
        return [(section, _text(content))]
    return [(f"{section}: {name}", _text(value)) for name, value in content.items()]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)

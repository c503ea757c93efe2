"""`moepack methods`: the compression methods and their settings."""

from typing import Annotated

import typer

from moepack.cli.settings import flag, options_of
from moepack.methods import METHODS
from moepack.methods.settings import REQUIRED, Setting, settings_of

__all__ = ["methods_command"]


def methods_command(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/methods/settings.md.")] = False,
) -> None:
    """List the compression methods and their options."""
    if markdown:
        print(_page(), end="")
        return
    for name, declaration in METHODS.items():
        print(f"{name}: {declaration.summary}")
        print(f"    {' '.join(options_of(name))}")


def _page() -> str:
    """Return the page of all settings, which is derived from the declarations of the methods."""
    lines = [
        "# Settings of all methods",
        "This page lists all settings of all methods. `moepack methods --markdown` prints it.",
        "",
        "A setting is a keyword of `moepack.compress` (`group_size`) and an option of the command (`--group-size`).",
        "Those without an option are for research from Python.",
    ]
    for name, declaration in METHODS.items():
        lines += ["", f"## {name}", f"{declaration.summary[:1].upper()}{declaration.summary[1:]}.", ""]
        lines += ["| setting | option | values | default | meaning |", "|---|---|---|---|---|"]
        lines += [_row(setting) for setting in settings_of(declaration)]
    return "\n".join(lines) + "\n"


def _row(setting: Setting) -> str:
    option = f"`{setting.option or flag(setting.name)}`" if setting.users != "python" else ""
    kinds = [kind.__name__ for kind in setting.types if kind is not type(None)]
    default = "required" if setting.default is REQUIRED else setting.default_text or _shown(setting.default)
    meaning = f"{setting.help.rstrip('.')}.{f' {setting.note[:1].upper()}{setting.note[1:]}.' if setting.note else ''}"
    cells = (f"`{setting.name}`", option, setting.values or " or ".join(kinds), default, meaning)
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return "" if default is None else str(default)

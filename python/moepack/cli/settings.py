"""The settings of all methods as command-line options, derived from the declarations of the methods.

Settings that most people need come first. Settings of single methods are for experts and have their own panels.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from inspect import Parameter
from typing import Annotated, Any

import typer

from moepack.methods import METHODS, method_class
from moepack.methods.overrides import is_by_name
from moepack.methods.settings import Setting, Users, settings_of

__all__ = ["declared", "epilog", "flag", "options_of", "parameters", "refuse_foreign", "without_names"]

SHARED = "Research: settings of several methods"

BITS = "bits"
BY_NAME = (
    "Bits by name, for any method: 'down_proj=4,experts.{0..3}=8,layers.0=16,*=3', or a file of such pairs. The first "
    "pattern that matches decides; 16 leaves a tensor unpacked. A plain value is the bits of the method."
)
"""The setting `bits`, and the part of its help that concerns all methods."""


def declared() -> dict[str, dict[str, Setting]]:
    """Return the settings that have an option: for each name, its declaration by every method that has it."""
    found: dict[str, dict[str, Setting]] = {}
    for method, declaration in METHODS.items():
        for setting in settings_of(declaration):
            if setting.users != "python":
                found.setdefault(setting.name, {})[method] = setting
    return found


def flag(setting: str) -> str:
    """Return the option of a setting: `--group-size` for `group_size`."""
    return "--" + setting.replace("_", "-")


def options_of(method: str) -> list[str]:
    """Return the options that a method accepts."""
    return [flag(setting.name) for setting in settings_of(METHODS[method]) if setting.users != "python"]


def refuse_foreign(method: str, given: Iterable[str]) -> None:
    """Reject settings that `method` does not accept. An unknown method passes: `create` rejects it.

    Raises:
        ValueError: the method does not accept a setting; the message lists those that it accepts.
    """
    if method not in METHODS:
        return
    if foreign := [flag(setting) for setting in given if flag(setting) not in options_of(method)]:
        if foreign == [flag(BITS)] and _pins(method):
            raise ValueError(f"--method {method} takes --bits only as PATTERN=BITS, for example 'down_proj=4'")
        raise ValueError(
            f"--method {method} does not take {', '.join(foreign)}; it takes {', '.join(options_of(method))}"
        )


def _pins(method: str) -> bool:
    """Return whether a method gives bits by name."""
    from moepack.methods.pinned import PinsBits

    return issubclass(method_class(method), PinsBits)


def without_names(given: Mapping[str, Any]) -> list[str]:
    """Return the names of given settings except bits by name, which every method accepts or rejects by itself."""
    return [name for name, value in given.items() if name != BITS or not is_by_name(value)]


def epilog() -> str:
    """Return the text below the options: each method with its options."""
    methods = (f"{name}: {each.summary}. {' '.join(options_of(name))}" for name, each in METHODS.items())
    return "\n\n".join(["Methods and their options:", *methods])


def parameters(users: Users) -> list[Parameter]:
    """Return the options of all settings for some users as parameters of a typer command; each defaults to None."""
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name, each))
        for name, each in declared().items()
        if _users(each) == users
    ]


def _users(each: Mapping[str, Setting]) -> Users:
    """Return who an option is for: most people if one method says so."""
    return "basic" if any(setting.users == "basic" for setting in each.values()) else "expert"


def _annotation(name: str, each: Mapping[str, Setting]) -> Any:
    """Return the type of an option with its help and panel: its only method's, or the shared one."""
    panel = None
    if _users(each) == "expert":
        panel = f"Research: --method {next(iter(each))}" if len(each) == 1 else SHARED
    flags = next((setting.option for setting in each.values() if setting.option), None)
    kind = _type(each)
    bounds = _common_bounds(each) if kind in (int, float) else {}
    about = f"{BY_NAME} {help_of(each)}" if name == BITS else help_of(each)
    option = typer.Option(*([flags] if flags else []), help=about, rich_help_panel=panel, **bounds)
    return Annotated[kind | None, option]


def _type(each: Mapping[str, Setting]) -> Any:
    """Return the type that holds the values of all methods: text if one accepts text."""
    kinds = {kind for setting in each.values() for kind in setting.types}
    return next(kind for kind in (str, float, int, bool) if kind in kinds)


def _common_bounds(each: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the inclusive bounds of an option if all methods have the same ones."""
    bounds = {(setting.minimum, setting.maximum) for setting in each.values()}
    return dict(zip(("min", "max"), bounds.pop(), strict=True)) if len(bounds) == 1 else {}


def help_of(each: Mapping[str, Setting]) -> str:
    """Return the help of an option. Methods that declare it alike share a sentence.

    The sentence of the default method, or of a setting's only method, does not name the method.
    """
    groups: dict[tuple[str, str], dict[str, Setting]] = {}
    for method, setting in each.items():
        groups.setdefault((setting.help, setting.values), {})[method] = setting
    plain = _users(each) == "basic" or len(each) == 1
    sentences = []
    for position, ((text, values), members) in enumerate(groups.items()):
        sentence = _sentence(text, values, members)
        if position or not plain:
            sentence = f"{', '.join(members)}: {_lowered(sentence)}"
        sentences.append(sentence)
    notes = (f"{method}: {setting.note}." for method, setting in each.items() if setting.note)
    return " ".join([*sentences, *notes])


def _sentence(text: str, values: str, members: Mapping[str, Setting]) -> str:
    """Return a help text with its values and defaults; a text that ends with a period says all."""
    if text.endswith("."):
        return text
    shown = {method: setting.default_text for method, setting in members.items()}
    usual = Counter(shown.values()).most_common(1)[0][0]
    others = ", ".join(f"{method}: {default}" for method, default in shown.items() if default != usual and default)
    words = [*filter(None, (usual, others and f"({others})"))]
    default = " ".join(["default", *words]) if words else ""
    if values:
        return f"{text} ({'; '.join(part for part in (values, default) if part)})."
    return f"{text}; {default}." if default else f"{text}."


def _lowered(text: str) -> str:
    """Begin a text with a small letter unless its first word is an abbreviation."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]

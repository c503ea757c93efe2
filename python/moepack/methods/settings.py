"""Declarations of methods: one dataclass per method, whose fields describe its settings.

A field made by `setting` carries its help, its allowed values and the users that it is for. Everything else is derived
from these fields: the checks of values, the keywords of `moepack.compress`, the options of `moepack compress` and their
help, the settings recorded in the manifest, and the table in the documentation.

Declarations import nothing heavy, so that `moepack compress --help` stays fast.
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

__all__ = [
    "REQUIRED",
    "Setting",
    "Settings",
    "in_words",
    "setting",
    "settings_of",
]

REQUIRED: Any = MISSING
"""Default of a setting without a default."""

Users = Literal["basic", "expert", "python"]
"""Who a setting is for: most people, experts, or only callers from Python, who have no command-line option for it."""

_KEY = "setting"


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting.

    Attributes:
        help: what it means, as a sentence without its values and default.
        note: a remark for this method only, shown behind the help.
        users: who it is for.
        option: flags of the command line, such as `--symmetric/--asymmetric`; by default the name.
        choices: allowed values; empty if there is no list.
        minimum, maximum: inclusive bounds.
        above, below: exclusive bounds.
        shown: the default in words; None shows its value.
        absent: text that stands for None; refused if the setting cannot be None.
        recorded: whether it changes the output and is recorded in the manifest.
        name, types, default: as declared by the dataclass.
    """

    help: str = ""
    note: str = ""
    users: Users = "python"
    option: str = ""
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    shown: str | None = None
    absent: str | None = None
    recorded: bool = True
    name: str = ""
    types: tuple[type, ...] = ()
    default: Any = None

    @property
    def values(self) -> str:
        """The allowed values in words; empty if the type says all."""
        if self.choices:
            return in_words(self.choices)
        if self.minimum is not None and self.maximum is not None:
            return f"{self.minimum:g} to {self.maximum:g}"
        if self.above is not None and self.below is not None:
            return f"between {self.above:g} and {self.below:g}"
        return ""

    @property
    def default_text(self) -> str:
        """The default in words; empty if there is none, or if the help tells it."""
        if self.shown is not None:
            return self.shown
        return "" if self.default in (REQUIRED, None) or isinstance(self.default, bool) else str(self.default)

    def checked(self, value: Any) -> Any:
        """Return a given value, converted from text if the setting is a number.

        Raises:
            ValueError: the value is not allowed; the message names the setting and the allowed values.
        """
        if self.absent is not None and value == self.absent:
            if type(None) not in self.types:
                raise ValueError(f"{self.name} must not be {value}: this method needs one")
            value = None
        if value is None and type(None) in self.types:
            return None
        value = self._converted(value)
        if self.choices and value not in self.choices:
            raise ValueError(f"{self.name} must be {self.values}, not {value}")
        if isinstance(value, int | float) and not isinstance(value, bool) and not self._is_within(value):
            raise ValueError(f"{self.name} must be {self.values or self._bound}, not {value}")
        return value

    def _converted(self, value: Any) -> Any:
        """Convert a number given as text, and text given as a number."""
        if isinstance(value, str):
            if int in self.types and value.lstrip("-").isdecimal():
                return int(value)
            if str not in self.types and (int in self.types or float in self.types):
                return self._number(value)
        if isinstance(value, int) and not isinstance(value, bool) and self.types and not {int, float} & {*self.types}:
            return str(value) if str in self.types else value
        if isinstance(value, float) and int in self.types and float not in self.types:
            if not value.is_integer():
                raise ValueError(f"{self.name} must be a whole number, not {value}")
            return int(value)
        return value

    def _number(self, text: str) -> float:
        try:
            if float not in self.types:
                raise ValueError
            return float(text)
        except ValueError:
            raise ValueError(f"{self.name} must be a number, not '{text}'") from None

    def _is_within(self, value: float) -> bool:
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    @property
    def _bound(self) -> str:
        """The bounds in words if there is only one."""
        bounds = (("at least", self.minimum), ("at most", self.maximum), ("above", self.above), ("below", self.below))
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


def setting(default: Any = REQUIRED, **declared: Any) -> Any:
    """Return the dataclass field of a setting.

    Args:
        default: its default; REQUIRED if it must be given.
        declared: the attributes of its `Setting`.
    """
    return field(default=default, metadata={_KEY: Setting(**declared)})


class Settings:
    """Base of all declarations. A subclass is a dataclass; its fields are the settings of the method.

    Attributes:
        name: name of the method on the command line.
        summary: the method in a line.
        implementation: `module:class` of the method if the declaration is not the method itself.
        seconds: seconds in which one thread packs 10^9 weights without calibration, after the plan; None: no estimate.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    implementation: ClassVar[str] = ""
    seconds: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        """Check all values.

        Raises:
            ValueError: a value is not allowed.
        """
        for each in settings_of(type(self)):
            object.__setattr__(self, each.name, each.checked(getattr(self, each.name)))

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings that change the output, as JSON values; part of the job's fingerprint."""
        return {each.name: getattr(self, each.name) for each in settings_of(type(self)) if each.recorded}


def settings_of(declaration: type) -> tuple[Setting, ...]:
    """Return the settings that a dataclass declares; a field not made by `setting` has only a name and a type."""
    if not is_dataclass(declaration):
        return ()
    hints = get_type_hints(declaration)
    return tuple(
        _named(each.metadata.get(_KEY, Setting()), each.name, hints[each.name], each.default)
        for each in fields(declaration)
        if each.init
    )


def _named(declared: Setting, name: str, hint: Any, default: Any) -> Setting:
    """Complete a declaration by the name, the type and the default of its field."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    literals = tuple(value for each in members if get_origin(each) is Literal for value in get_args(each))
    plain = [each for each in members if isinstance(each, type)] + [type(value) for value in literals]
    choices = declared.choices or literals
    return replace(declared, name=name, types=tuple(dict.fromkeys(plain)), choices=choices, default=default)


def in_words(values: Sequence[Any]) -> str:
    """Return a list in words: "2, 3 or 4"."""
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"

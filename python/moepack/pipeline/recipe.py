"""Recipes: `recipe.yaml`, which `compress` writes into every packed directory and takes back.

A recipe holds everything that determines the output: the source, the method with all settings, bits by name, and the
version of moepack. The same recipe, source, text and version give the same bytes. A recipe can be shared and edited: it
names a model on the Hub, identifies a directory by its digest, and holds no path except that of a text, as it was
given. The manifest does not list the file, so that it may be edited in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from moepack import _core
from moepack.errors import RecipeError
from moepack.format.side import RECIPE
from moepack.methods import METHODS, Method, MethodPlan
from moepack.methods.overrides import Overrides, is_by_name, split_bits
from moepack.methods.settings import Setting, settings_of
from moepack.pipeline.pruning import Pruning
from moepack.pipeline.source import Source
from moepack.textfile import NO_TEXT, read_text

__all__ = ["Origin", "Recipe"]

_TEXTS = {"name", "revision", "digest"}
_HEAD = "# How this directory was made. `moepack compress MODEL OUT --recipe recipe.yaml` makes it again.\n"

_SIZES = ({"size", "bits_per_weight", "ratio"}, {"rank", "memory_budget"})
"""Settings that exclude each other: a given one replaces the others of a recipe."""


@dataclass(frozen=True)
class Origin:
    """The source of a job.

    Attributes:
        name: the Hub id without a revision; empty for a directory, whose path means nothing on another machine.
        revision: the commit of a model on the Hub; None for a directory.
        digest: fingerprint of the checkpoint.
    """

    name: str = ""
    revision: str | None = None
    digest: str = ""

    @classmethod
    def of(cls, source: Source) -> Origin:
        """Return the origin of an open source."""
        return cls(source.name, source.commit, source.checkpoint.fingerprint().partition("+")[0])


@dataclass(frozen=True)
class Recipe:
    """The content of a recipe.

    Attributes:
        method: name of the method.
        settings: its settings, without bits by name.
        bits: bits by name.
        mtp_bits: as for `compress`.
        pruning: the experts to leave out; None for none.
        source: the source that it was made for; None if it says nothing.
        calibration_sha256: fingerprint of the calibration set; empty without one.
        moepack: version of moepack.
        file: the file that it was read from.
    """

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    bits: Overrides = field(default_factory=Overrides)
    mtp_bits: int | None = None
    pruning: Pruning | None = None
    source: Origin | None = None
    calibration_sha256: str = ""
    moepack: str = _core.__version__
    file: Path | None = None

    @classmethod
    def of(cls, plan: MethodPlan, source: Source, mtp_bits: int | None, calibration_sha256: str) -> Recipe:
        """Return the recipe of a planned job; a size that was not requested is the one that was chosen."""
        method = plan.method
        chosen: dict[str, Any] = {}
        if plan.goal is not None and all(getattr(method, name, None) is None for names in _SIZES for name in names):
            chosen["size"] = plan.goal.nbytes
        if getattr(method, "calibration", NO_TEXT) is None or (method.name == "auto" and plan.request is None):
            chosen["calibration"] = NO_TEXT
        settings = _settings(method, chosen)
        return cls(
            method.name, settings, method.overrides, mtp_bits, source.pruning, Origin.of(source), calibration_sha256
        )

    def to_bytes(self) -> bytes:
        """Return the content of the file; the same recipe gives the same bytes."""
        yaml: Any = import_module("yaml")  # a dependency of huggingface_hub; it has no type stubs

        content: dict[str, Any] = {"moepack": self.moepack}
        if self.source is not None:
            named = {"name": self.source.name, "revision": self.source.revision, "digest": self.source.digest}
            content["source"] = {key: value for key, value in named.items() if value}
        content |= {"method": self.method, "settings": dict(self.settings)}
        if self.bits:
            content["bits"] = {pattern: int(bits) if bits.is_integer() else bits for pattern, bits in self.bits.items}
        if self.mtp_bits is not None:
            content["mtp_bits"] = self.mtp_bits
        if self.pruning is not None:
            content["prune"], content["prune_by"] = self.pruning.share, self.pruning.by
        if self.calibration_sha256:
            content["calibration_sha256"] = self.calibration_sha256
        text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
        return (_HEAD + text).encode()

    @classmethod
    def read(cls, file: str | PathLike[str]) -> Recipe:
        """Read a recipe; a directory stands for its `recipe.yaml`.

        Raises:
            TextError: the file cannot be read.
            RecipeError: it is not YAML, or has an unknown entry or a value of a wrong type.
            OverrideError: its bits by name are malformed.
        """
        yaml: Any = import_module("yaml")  # a dependency of huggingface_hub; it has no type stubs

        path = Path(file)
        path = path / RECIPE if path.is_dir() else path
        try:
            text = read_text(path)
            content = yaml.safe_load(text)
            _refuse_twice(yaml.compose(text, yaml.SafeLoader), path)
        except yaml.YAMLError as error:
            raise RecipeError(f"is not valid YAML: {' '.join(str(error).split())}", file=path) from error
        if not isinstance(content, dict):
            raise RecipeError("holds no entries such as `method: auto`", file=path)
        _refuse_unknown(content, _ENTRIES, "entry", path)
        method = _typed(content, "method", str, "auto", path)
        if method not in METHODS:
            raise RecipeError(f"there is no method '{method}'{_near(method, METHODS)}", file=path)
        settings = _typed(content, "settings", dict, {}, path)
        known = {each.name: each for each in settings_of(METHODS[method])}
        _refuse_unknown(settings, known, f"setting of the method {method}", path)
        for name, value in settings.items():
            if not is_by_name(value):
                _check(known[name], value, path)
        source = _typed(content, "source", dict, {}, path)
        _refuse_unknown(source, _TEXTS, "entry of the source", path)
        texts = {key: text for key in source if (text := _typed(source, key, str, None, path)) is not None}
        bits = content.get("bits") or {}
        if not isinstance(bits, dict | str):
            raise RecipeError("bits must map patterns to bits", file=path)
        return cls(
            method,
            settings,
            Overrides.of(bits) if isinstance(bits, dict) else split_bits(bits)[1],
            _typed(content, "mtp_bits", int, None, path),
            _pruning(content, path),
            Origin(**texts) if texts else None,
            _typed(content, "calibration_sha256", str, "", path),
            str(content.get("moepack", "")),
            path,
        )

    def merged(self, method: str | None, given: Mapping[str, Any]) -> tuple[str, dict[str, Any], tuple[str, ...]]:
        """Return the method and settings of a job that follows the recipe, except for what is given explicitly.

        Returns:
            The method's name, its settings, and a note on each entry of the recipe that was replaced.
        """
        settings = dict(self.settings)
        if self.bits:
            settings["bits"] = f"{settings['bits']},{self.bits}" if "bits" in settings else self.bits
        if method is not None and method != self.method:
            kept = {"bits": self.bits} if self.bits else {}
            note = f"The method {method} was given, so the recipe's method {self.method} and its settings do not apply."
            return method, {**kept, **given}, (note,)
        notes = []
        for name, value in given.items():
            group = next((names for names in _SIZES if name in names), {name})
            for old in [each for each in settings if each in group]:
                before = settings.pop(old)
                if old != name or before != value:
                    notes.append(f"{name} {value} was given and replaces the recipe's {old} {before}.")
        return self.method, {**settings, **given}, tuple(notes)

    def differences(self, made: Recipe) -> tuple[str, ...]:
        """Return notes on what was not as in this recipe although no explicit setting says so."""
        notes = []
        if self.source is not None and made.source is not None and self.source.digest not in ("", made.source.digest):
            name = f": {self.source.name}" if self.source.name else ""
            notes.append(f"The recipe was made for another checkpoint{name}.")
        if self.calibration_sha256 and made.calibration_sha256 not in ("", self.calibration_sha256):
            notes.append("The calibration set differs from the recipe's.")
        if self.moepack not in ("", made.moepack):
            notes.append(f"The recipe was made by moepack {self.moepack}, this is {made.moepack}.")
        return tuple(notes)

    def without_source(self) -> Recipe:
        """Return a copy without the source, to compare the recipes of equal checkpoints."""
        return replace(self, source=None)


_ENTRIES = ("moepack", "source", "method", "settings", "bits", "mtp_bits", "prune", "prune_by", "calibration_sha256")


def _settings(method: Method, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a method that have a value, as YAML values; `chosen` replaces some."""
    declared = METHODS.get(method.name, type(method))
    values = {each.name: chosen.get(each.name, getattr(method, each.name, None)) for each in settings_of(declared)}
    return {name: _plain(value) for name, value in values.items() if value is not None and value != ""}


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    return fspath(value) if isinstance(value, PathLike) else str(value)


def _pruning(content: Mapping[str, Any], file: Path) -> Pruning | None:
    try:
        found = Pruning.of(content.get("prune"), content.get("prune_by"))
    except ValueError as error:
        raise RecipeError(str(error), file=file) from error
    if found is not None and found.share is None:
        raise RecipeError("prune must be a share: a recipe has the one that was chosen", file=file)
    return found


def _typed(content: Mapping[str, Any], key: str, kind: type, default: Any, file: Path) -> Any:
    value = content.get(key, default)
    if value is not None and value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
        raise RecipeError(f"{key} must be {_KINDS[kind]}, not {value!r}", file=file)
    return default if value is None else value


_KINDS = {str: "text", int: "a whole number", dict: "a mapping"}


def _check(setting: Setting, value: Any, file: Path) -> None:
    try:
        setting.checked(value)
    except ValueError as error:
        raise RecipeError(str(error), file=file) from error


def _refuse_twice(node: Any, file: Path) -> None:
    """Reject entries that are given twice, which YAML's parser accepts: the entries of the file, and those in them."""
    inner = [value for _, value in node.value] if node is not None and node.id == "mapping" else []
    for each in (node, *inner):
        names = [key.value for key, _ in each.value] if each is not None and each.id == "mapping" else []
        if twice := [name for name in names if isinstance(name, str) and names.count(name) > 1]:
            raise RecipeError(f"the entry {twice[0]} is given twice", file=file)


def _refuse_unknown(content: Mapping[Any, Any], known: Iterable[str], what: str, file: Path) -> None:
    known = list(known)
    for key in content:
        if key not in known:
            raise RecipeError(f"there is no {what} '{key}'{_near(str(key), known)}", file=file)


def _near(word: str, known: Iterable[str]) -> str:
    found = get_close_matches(word, [*known], 3, 0.5)
    return f"; the nearest are {', '.join(found)}" if found else f"; there are {', '.join(known)}"

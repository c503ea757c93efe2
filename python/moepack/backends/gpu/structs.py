"""Structs that launches pass to kernels by value, as the CUDA sources declare them.

The C declaration is the only description: its members become a NumPy type with the layout that the C ABI prescribes,
and values are given by the members' names. A member that is added, removed, moved or retyped in a source changes the
type; a launch that does not follow fails with a `TypeError` that names the members.

Members are integers (`int`, `u32`, `i64` and so on), pointers, and other structs. Constants, methods, nested types and
comments are skipped; anything else is an error.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from struct import Struct as Packer
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moepack.backends.gpu.compiler import sources
from moepack.errors import DeviceError

__all__ = ["ACTIVATIONS", "DIVISOR", "TYPES", "Struct", "StructValue", "activations", "divisor"]

StructValue = NDArray[Any]
"""One struct: an array with a single element of a `Struct`'s type."""

_SCALARS = {
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "i64": np.int64, "int": np.int32,
    "float": np.float32, "Type": np.int32,
}  # fmt: skip
"""The fixed-width types of `cuda/common/types.cuh`; `Type` is an enumeration of int."""

_CODES = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "i4": "i", "i8": "q", "f4": "f"}
"""NumPy's scalars in the notation of `struct`."""

TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""The values of `Type`."""

_MEMBER = re.compile(r"(?:const )?(?:typename )?(?P<type>[\w:]+) (?P<names>\*?\w+(?:, \*?\w+)*)")
_NO_MEMBER = re.compile(r"(?:static|using|struct|template|MOEPACK_BOTH|MOEPACK_DEVICE)\b")


class Struct:
    """A struct of a CUDA source.

    Args:
        source: the file in the folder `cuda`.
        name: the struct's name, with that of the struct around it (`Groupwise::Matrix`).
        definitions: the values of macros that lines `#if NAME` in the struct test.
        **types: the structs that are members by value, by the last part of their types' names.
    """

    def __init__(self, source: str, name: str, definitions: Mapping[str, int] | None = None, **types: "Struct") -> None:
        self.source, self.name = source, name
        self._definitions, self._types = {"defined(__CUDACC__)": 1, **(definitions or {})}, types

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The type of a value, laid out as by a C compiler.

        Raises:
            DeviceError: the source has no such struct, or a member of another type.
        """
        return np.dtype([(name, self._type(of)) for of, name in self._members()], align=True)

    def __call__(self, **members: Tensor | StructValue | int | float | None) -> StructValue:
        """Return a value; all members must be given.

        Args:
            **members: tensors become pointers, None a null pointer.

        Raises:
            TypeError: a member is missing, or there is no such member.
        """
        names, known, packer = self._packer
        if members.keys() != known:
            raise TypeError(f"{self.name} of {self.source} has the members {names}, got {tuple(members)}")
        packed = packer.pack(*[_plain(members[name]) for name in names])
        return np.frombuffer(bytearray(packed), self.dtype)

    @cached_property
    def _packer(self) -> tuple[tuple[str, ...], frozenset[str], Packer]:
        """The members' names, in order and as a set, and what packs their values.

        A launch takes less time than NumPy takes for a struct.
        """
        fields: Mapping[str, Any] = self.dtype.fields or {}
        names, form, end = self.dtype.names or (), "<", 0
        for name in names:
            kind, offset = fields[name][:2]
            form += f"{offset - end}x" + (f"{kind.itemsize}s" if kind.names else _CODES[kind.str[1:]])
            end = offset + kind.itemsize
        return names, frozenset(names), Packer(form + f"{self.dtype.itemsize - end}x")

    def _type(self, name: str) -> Any:
        if name in _SCALARS:
            return _SCALARS[name]
        try:
            return self._types[name.rpartition("::")[2]].dtype
        except KeyError:
            raise self._error(f"has a member of type {name}, which no launch passes") from None

    def _members(self) -> Iterator[tuple[str, str]]:
        """Yield the type and name of each member; pointers have the type `u64`."""
        for statement in self._body().split(";"):
            text = " ".join(statement.split())
            if not text or _NO_MEMBER.match(text):
                continue
            found = _MEMBER.fullmatch(text)
            if found is None:
                raise self._error(f"has a declaration that is no list of members: {text}")
            for name in found["names"].split(", "):
                yield ("u64" if name.startswith("*") else found["type"]), name.removeprefix("*")

    def _body(self) -> str:
        """The text between the struct's braces, without comments and without the bodies of what is declared in it."""
        text = re.sub(r"//.*", "", (sources() / self.source).read_text(encoding="utf-8"))
        for name in self.name.split("::"):
            found = re.search(rf"\bstruct {name}(?: : \w+)? \{{", text)
            if found is None:
                raise self._error("is not declared")
            text = _until_closed(text[found.end() :])
        text = re.sub(r"#if (\S+)\n(.*?)#endif\n", self._chosen, text, flags=re.DOTALL)
        while "{" in text:
            text = re.sub(r"\{[^{}]*\}", ";", text)
        return re.sub(r"(?<=[\w>])(\s*\*+)\s*(?=\w)", r" *", text)

    def _chosen(self, block: re.Match[str]) -> str:
        if block[1] not in self._definitions:
            raise self._error(f"depends on {block[1]}")
        return block[2] if self._definitions[block[1]] else ""

    def _error(self, what: str) -> DeviceError:
        return DeviceError(f"the struct {self.name} {what}", file=sources() / self.source)


def _until_closed(text: str) -> str:
    """The text before the brace that closes the one opened before it."""
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[: brace.start()]
    return text


def _plain(value: Tensor | StructValue | int | float | None) -> Any:
    """A member's value as NumPy takes it."""
    if isinstance(value, (int, float)):  # most members
        return value
    if isinstance(value, Tensor):
        return value.data_ptr()
    return 0 if value is None else value.tobytes()


ACTIVATIONS = Struct("common/types.cuh", "Activations")
DIVISOR = Struct("common/schedule.cuh", "Divisor")


def activations(x: Tensor) -> StructValue:
    """Rows of bfloat16, float16 or float32 as the kernels' `Activations`."""
    return ACTIVATIONS(data=x, type=TYPES[x.dtype], columns=x.shape[1])


@lru_cache(maxsize=4096)
def divisor(by: int) -> StructValue:
    """A number to divide by as the kernels' `Divisor`, read-only: launches repeat few numbers."""
    found = DIVISOR(by=by, inverse=(2**32 - 1) // by)
    found.flags.writeable = False
    return found

"""Structs that launches pass to kernels: their layout is the compiler's, and every kernel's structs are read from its
source. Needs no GPU.
"""

import importlib
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import moepack.backends.gpu as package
from moepack.backends.gpu import compiler, structs
from moepack.backends.gpu.structs import ACTIVATIONS, Struct, activations
from moepack.errors import DeviceError

MODULES = [
    importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)
]
STRUCTS = {id(value): value for module in MODULES for value in vars(module).values() if isinstance(value, Struct)}
"""The structs of all launches."""

GROUPWISE = {"BITS": 4, "GROUP": 64, "SYMMETRIC": 0, "HALVES": 1, "TOKENS": 8, "RESIDENT": 2}
PROGRAMS = [
    ("groupwise.cu", {**GROUPWISE, "RANK_BITS": 0}),
    ("groupwise.cu", {**GROUPWISE, "RANK_BITS": 3}),
    ("groupwise_linear.cu", {**GROUPWISE, "TOKENS": 64, "RANK_BITS": 0}),
    ("groupwise_grouped.cu", {**GROUPWISE, "TOKENS": 64, "RANK_BITS": 0}),
    ("codebook_grouped.cu", {"BITS": 4, "PLANES": 2}),
    ("codebook.cu", {"BITS": 4, "PLANES": 2, "TOKENS": 8, "RESIDENT": 2}),
    ("codebook_linear.cu", {"BITS": 4, "PLANES": 2}),
    ("coded.cu", {"TOKENS": 8, "MOST_THREADS": 512, "DEPENDENT": 0, "MANY": 0}),
    ("coded_grouped.cu", {}),
    ("coded_upload.cu", {}),
    ("step.cu", {}),
    ("attention.cu", {"HALF": 0, "NARROW": 0, "KEY_WIDTH": 128, "VALUE_WIDTH": 128}),
    ("prompt.cu", {"HALF": 0, "NARROW": 0, "WIDTH": 128, "HEADS": 8, "PARTS": 1}),
    ("clamped.cu", {}),
    ("draw.cu", {}),
    ("router.cu", {"SCORES": 4}),
    ("trellis.cu", {}),
    ("columns.cu", {}),
    ("dense.cu", {"HALF": 0, "COLUMNS": 8, "TEAM": 8}),
    ("channels.cu", {"BITS": 4, "REFINES": 1}),
    ("ternary.cu", {"DICT16": 0, "TOKENS": 1, "LANES": 32, "GLOBAL": 0, "THREADS": 512}),
]
"""A program of every source."""

FORMATS = {"groupwise_linear.cu": "GroupwiseLinear", "codebook_linear.cu": "CodebookLinear"}
"""The argument of the template `Linear`."""


def kernel_structs():
    """The types of the kernels' parameters that are neither pointers nor numbers, with the source of each kernel."""
    launch = re.compile(r"(?:__global__|MOEPACK_LAUNCH|CODED_KERNEL)\s(?:[^;{]*?\s)?\w+\(([^()]*)\)\s*\{")
    for path in sorted(compiler.sources().glob("**/*.cu*")):
        text = re.sub(r"//.*|\\$", "", path.read_text(), flags=re.MULTILINE)
        for parameters in launch.findall(text):
            for parameter in " ".join(parameters.split()).split(", "):
                kind = parameter.removeprefix("const ").rpartition(" ")[0]
                if "*" not in parameter and kind not in structs._SCALARS:
                    yield path.name, kind.removeprefix("moepack::")


def test_every_struct_of_a_kernel_is_read_from_its_source():
    passed = set(kernel_structs())
    assert {"CodedProblem", "Problem", "FORMAT::Matrix", "Sparse", "Upload", "Launch"} <= {kind for _, kind in passed}
    known = {struct.name for struct in STRUCTS.values()} | {"FORMAT::Matrix", "Linear<FORMAT>"}
    assert {kind for _, kind in passed} <= known
    # The macros of kernels are generic over the format, so a source that uses them has a matrix of its own.
    for source, text in ((path, path.read_text()) for path in compiler.sources().glob("*.cu")):
        if found := re.search(r"^MOEPACK_\w+_KERNELS\((?:\w+::)?(\w+)\)", text, re.MULTILINE):
            whole = "".join((compiler.sources() / name).read_text() for name in included(source.name))
            base = re.search(rf"struct {found[1]} : (\w+)", whole)
            assert f"{(base or found)[1]}::Matrix" in known, source


def test_no_module_describes_a_struct_itself():
    for module in MODULES:
        described = re.findall(r"np\.dtype\(\s*[\[(]", Path(module.__file__).read_text())
        assert module is structs or not described, module.__name__


def included(source):
    """A source and what it includes."""
    text = (compiler.sources() / source).read_text()
    return {source}.union(*(included(header) for header in re.findall(r'#include "(.*)"', text)))


def assertions(struct, source):
    """The layout of a struct as C++; the compiler's `offsetof` is no constant in programs without a host compiler."""
    name = struct.name + (f"<{FORMATS[source]}>" if struct.name == "Linear" else "")
    yield f"static_assert(sizeof({name}) == {struct.dtype.itemsize});"
    for member, (kind, offset, *_) in struct.dtype.fields.items():
        yield f"static_assert(__INTADDR__(&((({name}*)0)->{member})) == {offset});"
        yield f"static_assert(sizeof({name}::{member}) == {kind.itemsize});"


def contained(source, definitions):
    """The structs of a program; of two whose members depend on macros, the one for its definitions."""
    files = included(source)
    for struct in STRUCTS.values():
        bits = struct._definitions.get("RANK_BITS", definitions.get("RANK_BITS", 0))
        matrix = struct._types.get("Matrix")
        here = matrix is None or FORMATS.get(source, "").startswith(matrix.name.partition("::")[0])
        if struct.source in files and bool(bits) == bool(definitions.get("RANK_BITS", 0)) and here:
            yield struct


@pytest.fixture(scope="module")
def nvrtc():
    try:
        compiler.require_compiler()
    except DeviceError as error:
        pytest.skip(str(error))
    return compiler._nvrtc()


@pytest.mark.parametrize(("source", "definitions"), PROGRAMS)
def test_layouts_are_those_of_the_compiler(nvrtc, source, definitions):
    found = list(contained(source, definitions))
    assert found
    lines = [line for struct in found for line in assertions(struct, source)]
    text = (compiler.sources() / source).read_text() + "\nnamespace moepack {\n" + "\n".join(lines) + "\n}\n"
    program = nvrtc.createProgram(text, source, (), ())
    options = [f"-D{name}={value}" for name, value in definitions.items()]
    folders = [f"-I{folder}" for folder in compiler._includes()]
    try:
        nvrtc.compileProgram(program, ("-arch=sm_90a", "--std=c++17", "-fdevice-syntax-only", *options, *folders))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))


def test_every_struct_is_compared_with_the_compiler():
    assert {source for source, _ in PROGRAMS} == {path.name for path in compiler.sources().glob("*.cu")}
    compared = {id(struct) for program in PROGRAMS for struct in contained(*program)}
    assert compared == STRUCTS.keys()


def test_members_are_given_by_name():
    x = torch.zeros(3, 8, dtype=torch.float16)
    value = activations(x)
    assert value["data"][0] == x.data_ptr() and value["type"][0] == 1 and value["columns"][0] == 8
    with pytest.raises(TypeError, match="columns"):
        ACTIVATIONS(data=x, type=1)
    with pytest.raises(TypeError, match="rows"):
        ACTIVATIONS(data=x, type=1, columns=8, rows=3)


@pytest.fixture
def declared(tmp_path, monkeypatch):
    """Writes a source, and returns a struct of it."""
    monkeypatch.setattr(structs, "sources", lambda: tmp_path)

    def write(body, **types):
        (tmp_path / "some.cu").write_text(f"struct Outer {{\n    struct Some {{\n{body}\n    }};\n}};\n")
        return Struct("some.cu", "Outer::Some", {"WIDE": 1, "NARROW": 0}, **types)

    return write


def test_declarations_are_read_as_by_a_compiler(declared):
    inner = declared("u8 a;  // one byte; no more\n const float *b, *c;\n u16 d;")
    assert inner.dtype.fields.keys() == {"a", "b", "c", "d"} and inner.dtype.itemsize == 32
    outer = declared(
        """int n;
        static constexpr int SIZE = 4;
        using Values = Piece<4>;
        struct Inside { int never; };
        moepack::Inner inner;
#if WIDE
        i64 wide;
#endif
#if NARROW
        int narrow;
#endif
        MOEPACK_BOTH int sum(int a) const {
            if (a) { return n; }
            return a + n;
        }
        u16 last;""",
        Inner=inner,
    )
    assert {name: offset for name, (_, offset) in outer.dtype.fields.items()} == {
        "n": 0, "inner": 8, "wide": 40, "last": 48,
    }  # fmt: skip
    assert outer.dtype.itemsize == 56
    value = outer(n=1, inner=inner(a=2, b=None, c=3, d=4), wide=5, last=6)
    assert value["inner"]["d"][0] == 4 and value.dtype == outer.dtype


@pytest.mark.parametrize(
    ("body", "what"),
    [("Other other;", "Other"), ("int a[3];", r"a\[3\]"), ("#if LATER\nint a;\n#endif\nint b;", "LATER")],
)
def test_declarations_that_cannot_be_passed_are_errors(declared, body, what):
    with pytest.raises(DeviceError, match=what):
        np.zeros(1, declared(body).dtype)


def test_a_struct_that_is_gone_is_an_error():
    with pytest.raises(DeviceError, match="Nothing is not declared"):
        Struct("common/types.cuh", "Nothing").dtype  # noqa: B018

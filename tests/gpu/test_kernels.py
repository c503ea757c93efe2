"""Every kernel, compiled for each architecture and disassembled. Needs no GPU.

Checks registers, spills, local memory, and the number of decoding operations per weight.
"""

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
from sass import DISASSEMBLER, INTEGER, disassemble

from moepack.backends.gpu import (
    attention,
    clamped,
    coded_launch,
    coded_upload,
    columns,
    compiler,
    dense,
    draw,
    groupwise_linear,
    prompt_attention,
    router,
    step,
    trellis,
)
from moepack.backends.gpu import channels as channel_kernels
from moepack.backends.gpu import codebook as codebook_kernels
from moepack.backends.gpu import groupwise as groupwise_kernels
from moepack.backends.gpu import ternary as ternary_kernels
from moepack.backends.gpu.families import FAMILIES
from moepack.backends.gpu.linear import COLUMNS
from moepack.errors import DeviceError

ARCHITECTURES = ("sm_80", "sm_90", "sm_90a")
SLOW = pytest.mark.slow


def groupwise(bits, group, symmetric, tokens=8, rank_bits=0):
    return groupwise_kernels._compiled(bits, group, bool(symmetric), True, rank_bits, tokens)


def codebook(bits, planes, tokens=8):
    return codebook_kernels._compiled(bits, planes, tokens)


def ternary(dict16, tokens, lanes, in_global=False):
    return ternary_kernels._program(bool(dict16), tokens, lanes, in_global)


PROGRAMS = {
    **{f"int{bits} by 64": groupwise(bits, 64, 0) for bits in (2, 3, 4, 8)},
    **{f"int{bits} by 64, 32 tokens": groupwise(bits, 64, 0, 32) for bits in (3, 8)},
    "int3 by 64 symmetric": groupwise(3, 64, 1),
    "int4 by 16": groupwise(4, 16, 0),
    "int2 by 256": groupwise(2, 256, 1),
    "int8 a row": groupwise(8, 0, 1),
    "int3 by 64 and factors": groupwise(3, 64, 0, rank_bits=3),
    **{f"codebook {bits} bits": codebook(bits, 2) for bits in (2, 3, 4)},
    "linear int3 by 64 symmetric": groupwise_linear.program(3, 64, True, True),
    **{f"linear int{bits} by 64": groupwise_linear.program(bits, 64, False, True) for bits in (4, 8)},
    **{f"grouped int{bits} by 64": groupwise_linear.grouped_program(bits, 64, bits > 3, True) for bits in (3, 8)},
    "grouped codebook": codebook_kernels._compiled_grouped(4, 2),
    "linear codebook 4 bits": codebook_kernels._compiled_linear(4, 2),
    "linear codebook 4 bits, rounded": codebook_kernels._compiled_linear(4, 1),
    "codebook 4 bits, 32 tokens": codebook(4, 2, 32),
    "codebook 4 bits, rounded": codebook(4, 1),
    "fsv8": ternary(0, 1, 32),
    "fsv8, 4 tokens, short rows": ternary(0, 4, 8),
    "fsv8, long rows": ternary(0, 1, 32, True),
    "dict16": ternary(1, 1, 16),
    "dict16, 4 tokens": ternary(1, 4, 32),
    "coded": coded_launch.program(1),
    "coded, 16 tokens": coded_launch.program(16),
    "coded, dependent": coded_launch.program(1, True),
    "coded, dependent, 16 tokens": coded_launch.program(16, True),
    "coded, many tokens": coded_launch.program(32, many=True),
    "coded, dependent, many tokens": coded_launch.program(16, True, many=True),
    "step": step.program(),
    "attention": attention.program(0, False, 128, 128),
    "attention, wide heads": attention.program(1, False, 256, 256),
    "attention, 8 bits": attention.program(0, True, 128, 128),
    "attention, 8 bits, wide heads": attention.program(1, True, 256, 256),
    "prompt attention": prompt_attention.program(0, False, 128, 8, 1),
    "prompt attention, single heads": prompt_attention.program(1, False, 64, 1, 4),
    "prompt attention, 8 bits": prompt_attention.program(0, True, 128, 8, 1),
    "router": router.program(4),
    "router, 512 experts": router.program(16),
    "dense": dense.program(0, 8, 8),
    "dense, 16 tokens": dense.program(1, 16, 4),
    "clamped": clamped.program(),
    "draw": draw.program(),
    "coded upload": coded_upload._program(),
    "grouped coded": coded_launch.tiles_program(),
    "trellis": trellis.program(),
    "columns": columns.program(),
    **{f"channels of {bits} bits": channel_kernels._program(bits) for bits in (4, 8, 16)},
    "residuals of 4 bits": channel_kernels._program(4, refines=True),
}
"""A program of each kind of inner loop."""

PLAIN = {
    *("int3 by 64", "int8 by 64, 32 tokens", "int3 by 64 and factors", "codebook 4 bits", "fsv8", "dict16", "coded"),
    *(
        "coded, dependent, 16 tokens",
        "coded upload",
        "linear int4 by 64",
        "grouped int3 by 64",
        "grouped codebook",
        "grouped coded",
    ),
    *("step", "attention", "attention, 8 bits", "prompt attention", "prompt attention, 8 bits", "router", "dense"),
    *("channels of 8 bits", "clamped", "draw", "trellis", "columns", "coded, dependent, many tokens"),
}
"""A program of each source. The tests marked as slow compile the others, and all for other GPUs than H100s: sm_80, and
sm_90, whose code newer GPUs get.
A compilation takes up to ten seconds."""

GROUPED = {"route", "lay_out", "add", *(f"{kernel}_{n}" for kernel in ("gated", "project") for n in (16, 32, 64))}
LINEAR = {"prepare", "add", *(f"linear_{columns}" for columns in COLUMNS)}

KERNELS = {
    "channels.cu": {"choose", "compute", "add", "dequantize", "gather"},
    "step.cu": {"rms_norm", "rotate", "add_norm", "prepare_heads"},
    "attention.cu": {"attend"},
    "prompt.cu": {"attend"},
    "router.cu": {"choose"},
    "clamped.cu": {"gate", "sum"},
    "draw.cu": {"choose"},
    "dense.cu": {"multiply"},
    "coded_upload.cu": {"measure", "write_records"},
    "trellis.cu": {"search", "spread"},
    "columns.cu": {"round_columns", "descend"},
    "groupwise_linear.cu": LINEAR,
    "codebook_linear.cu": LINEAR,
    "groupwise_grouped.cu": GROUPED,
    "codebook_grouped.cu": GROUPED,
    "coded_grouped.cu": GROUPED | {"gated_96", "project_96"},
}
"""The kernels of sources that have no products of whole matrices."""

CURRENT = compiler._nvrtc().getVersion() >= (13, 2)
"""Whether NVRTC is as new as the one whose code the bounds describe. Older ones spill more, and lose the logs of
programs that are compiled at the same time."""

_USE = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


SPILLS = {
    "int3 by 64": 64,
    "int3 by 64 symmetric": 64,
    "int3 by 64, 32 tokens": 128,
    "int8 by 64, 32 tokens": 128,
    "int3 by 64 and factors": 96,
    "int4 by 64": 64,
    "int4 by 16": 64,
    "codebook 2 bits": 64,
    "codebook 3 bits": 152,
    "codebook 4 bits": 192,
    "codebook 4 bits, rounded": 96,
    "grouped codebook": 8,
    "fsv8, long rows": 64,
    "coded, 16 tokens": 16,
    "coded, dependent, 16 tokens": 144,
    "coded, dependent, many tokens": 144,
}
"""Bytes of stack or of spills that a kernel may have. Two blocks of a multiprocessor leave 128 registers to a thread: a
few bytes cost less than a block. They are read where a block goes from one round to the next, above all the tables of a
codebook of 4 bits, which take 32 registers."""


@pytest.fixture(scope="module", autouse=True)
def compiled(request):
    """Compiles the programs of the selected tests on all cores; an error fails the test that needs the program.

    Every second test process starts from the other end: it finds what the first one has already kept on disk.
    """
    here = (item for item in request.session.items if item.module is request.module and hasattr(item, "callspec"))
    parameters = [item.callspec.params for item in here]
    wanted = {(each["name"], each.get("arch", "sm_90a")) for each in parameters if "name" in each}
    with ThreadPoolExecutor(os.cpu_count() if CURRENT else 1) as pool:
        backwards = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579"
        for job in [pool.submit(PROGRAMS[name].cubin, arch) for name, arch in sorted(wanted, reverse=backwards)]:
            job.exception()


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(name, arch, marks=[] if name in PLAIN and arch == "sm_90a" else SLOW)
        for name, arch in product(PROGRAMS, ARCHITECTURES)
    ],
)
def test_kernels_keep_their_values_in_registers(name, arch, tmp_path, monkeypatch):
    cubin, most = PROGRAMS[name].cubin(arch), SPILLS.get(name, 0)
    if not CURRENT:
        most = most * 3 // 2 + 8
        if "Compiling entry function" not in cubin.log:  # another thread compiled at the same time
            monkeypatch.setattr(compiler, "_folder", lambda: tmp_path)
            cubin = PROGRAMS[name].cubin(arch)
    kernels = _USE.findall(cubin.log)
    sums = "route" if "many tokens" in name else "combine"
    wanted = KERNELS.get(PROGRAMS[name].source, {"gated", sums, "dequantize"})
    assert wanted <= {kernel for kernel, *_ in kernels}
    for kernel, *bytes_, registers in kernels:
        assert max(map(int, bytes_)) <= most, f"{kernel}: bytes of stack, stored and loaded: {bytes_}"
        assert int(registers) < 255, kernel
    for kernel, code in disassemble(cubin.path).items():
        local = code.count("LDL", "STL")
        assert local <= most // 2, f"{kernel}: {local} accesses to local memory"
        tiles = re.fullmatch(r"(?:linear|gated|project)_\d+", kernel)
        together = tiles or (re.match(r"int.* 32 tokens", name) and kernel in ("gated", "combine"))
        if tiles and arch == "sm_90a":
            registers = next(int(registers) for found, *_, registers in kernels if found == kernel)
            moved = code.count("USETMAXREG") > 0
            assert moved or kernel.endswith(("_8", "_16")), f"{kernel} keeps registers where its warps copy"
            assert registers == 96 if moved else registers <= 96, "what its warps share out (REGISTERS)"
        if arch == "sm_90a" and together:
            assert code.count("HGMMA") > 0 and "serialized" not in cubin.log
        # NVRTC 13.0 used odd registers for descriptors, which a GPU rejects.
        assert not any(re.search(r"desc\[UR\d*[13579]\]", arguments) for _, arguments in code.instructions), kernel
        without = name.startswith(("fsv8", "dict16")) or (tiles and arch != "sm_90a")
        assert "gated" not in kernel or without or code.count("HMMA", "IMMA", "HGMMA") > 0


OPERATIONS = {
    # The program, weights of a lane in a product of its tensor cores, integer and f16 operations a weight at most.
    "int2 by 64": (8, 2.0),
    "int3 by 64": (8, 2.0),
    "int4 by 64": (8, 2.0),
    "int8 by 64": (8, 1.6),
    "codebook 4 bits": (16 / 4, 2.9),
    "codebook 3 bits": (16 / 4, 1.8),
    "codebook 2 bits": (16 / 4, 2.0),
    "codebook 4 bits, rounded": (16 / 2, 2.0),
    "coded": (8, 3.6),
    "coded, dependent": (8, 5.1),
}


@pytest.mark.parametrize("name", [name for name in SPILLS if name.startswith("coded")])
def test_spills_of_coded_integers_are_not_read_in_the_product_loop(name):
    for kernel in disassemble(PROGRAMS[name].cubin("sm_90a").path).values():
        assert not kernel.products()["LDL"] and not kernel.products()["STL"]


@pytest.mark.parametrize("name", OPERATIONS)
def test_decoding_takes_few_operations(name):
    weights, most = OPERATIONS[name]
    block = disassemble(PROGRAMS[name].cubin("sm_90a").path)["gated"].products()
    products = block["HMMA"] + block["IMMA"]
    operations = sum(count for opcode, count in block.items() if opcode in INTEGER | {"HADD2", "HFMA2", "HMUL2"})
    assert products >= 2 and operations / (weights * products) <= most, block


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("linear int3 by 64 symmetric", 3.0),
        ("linear int4 by 64", 3.0),
        ("linear codebook 4 bits", 3.6),
        ("linear codebook 4 bits, rounded", 3.4),
    ],
)
def test_a_linear_layer_takes_few_instructions(name, most):
    """All instructions of a warp for a chunk of a row block, 64 weights per lane: from the first product to the
    branch after the last, and the few before it."""
    code = disassemble(PROGRAMS[name].cubin("sm_90a").path)["linear_8"].instructions
    products = [at for at, (opcode, _) in enumerate(code) if opcode == "HGMMA"]
    end = next(at for at in range(products[-1], len(code)) if code[at][0] == "BRA")
    assert (end - products[0]) / 64 <= most


def test_every_family_has_programs():
    families = {f"{module}.cu" for module in FAMILIES.values()}
    others = (
        {
            "attention.cu",
            "clamped.cu",
            "coded_upload.cu",
            "columns.cu",
            "dense.cu",
            "draw.cu",
            "prompt.cu",
            "router.cu",
            "step.cu",
            "trellis.cu",
        }
        | {f"{name}_{kind}.cu" for name in ("groupwise", "codebook") for kind in ("linear", "grouped")}
        | {"coded_grouped.cu"}
    )
    assert {program.source for program in PROGRAMS.values()} == families | others
    assert {path.name for path in compiler.sources().glob("*.cu")} == {p.source for p in PROGRAMS.values()}


@pytest.fixture
def copied_sources(tmp_path, monkeypatch):
    """A modifiable copy of the sources and an empty folder for machine code."""
    folder = tmp_path / "cuda"
    shutil.copytree(compiler.sources(), folder)
    monkeypatch.setattr(compiler, "sources", lambda: folder)
    monkeypatch.setattr(compiler, "_folder", lambda: tmp_path)
    compiler._includes.cache_clear()
    yield folder
    compiler._includes.cache_clear()


def test_a_kernel_that_does_not_compile_says_where(copied_sources):
    (copied_sources / "broken.cu").write_text('#include "common/types.cuh"\nextern "C" __global__ void k() { what; }\n')
    with pytest.raises(DeviceError, match=r'broken\.cu: does not compile for sm_90a: broken\.cu\(2\).*"what"'):
        compiler.compile_source("broken.cu", "sm_90a")
    with pytest.raises(DeviceError, match="does not compile for sm_1"):
        compiler.compile_source("broken.cu", "sm_1")


def test_machine_code_is_kept_until_a_header_changes(copied_sources):
    (copied_sources / "small.cu").write_text('extern "C" __global__ void k(int* p) { *p = VALUE; }\n')
    first = compiler.compile_source("small.cu", "sm_90", ("-DVALUE=1",))
    time = first.path.stat().st_mtime_ns
    assert compiler.compile_source("small.cu", "sm_90", ("-DVALUE=1",)) == first
    assert first.path.stat().st_mtime_ns == time
    assert compiler.compile_source("small.cu", "sm_90", ("-DVALUE=2",)).path != first.path
    assert compiler.compile_source("small.cu", "sm_80", ("-DVALUE=1",)).path != first.path
    (copied_sources / "common" / "new.cuh").write_text("// changed\n")
    assert compiler.compile_source("small.cu", "sm_90", ("-DVALUE=1",)).path != first.path


def test_a_folder_that_cannot_be_written_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compiler.VARIABLE, str(tmp_path / "file"))
    assert compiler._folder.__wrapped__().is_dir()


def test_the_compiler_is_missing(monkeypatch):
    def fail():
        raise ImportError("No module named 'cupy_backends'")

    monkeypatch.setattr(compiler, "_nvrtc", compiler._nvrtc.__wrapped__)
    monkeypatch.setitem(__import__("sys").modules, "cupy_backends.cuda.libs", None)
    with pytest.raises(DeviceError, match=r"pip install 'moepack\[gpu\]'"):
        compiler.require_compiler()


def test_the_disassembler_is_there():
    assert DISASSEMBLER is not None

"""Simulates the AVX2 loops of coded integers on a processor that need not be there: cycles, and what bounds them.

    python -m benches.cpu.simulation [--cpu znver3] [--gigahertz 3.4] [--out build/simulation.json]

`objdump` disassembles the compiled core. Loops are found by their vector instructions and given to `llvm-mca`, which
models dispatch, ports, latencies and the scheduler, but no caches, no store-to-load forwarding, no second thread on the
core and no mispredictions: an estimate, not a measurement. Needs `binutils` and `llvm` (19 or newer).
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from moepack import _core


class Loop(NamedTuple):
    """The instructions that identify a loop, and the weights of an iteration."""

    weights: int
    counts: dict[str, int]


LOOPS = {
    # Four halves in step, tables of at most 16 symbols with frequencies below 128 and one edge a bucket.
    "decode": Loop(128, {"vpmovmskb": 4, "vpmulld": 4, "vpshufb": 32, "vpblendvb": 16}),
    # Four registers.
    "dependent": Loop(256, {"vpsllw": 8, "vpxor": 16, "vpblendvb": 8, "vpsubb": 8}),
    # One token; products add up in 16 bits over four registers.
    "products": Loop(256, {"vpmaddubsw": 8, "vpmaddwd": 2, "vpbroadcastd": 4}),
}
MOST = 400
"""The most instructions of a loop."""
Instruction = tuple[int, str, str]


def disassemble(library: str) -> list[Instruction]:
    """Address, name and operands of each instruction."""
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True)
    lines = (re.match(r"\s*([0-9a-f]+):\t(\S+)\s*([^#<]*)", line) for line in text.stdout.splitlines())
    return [(int(line[1], 16), line[2], line[3].strip()) for line in lines if line]


def loops(instructions: list[Instruction]) -> list[list[Instruction]]:
    """The loops: instructions from the target of each backward jump to the jump. Loops with calls are left out."""
    places, found = {address: i for i, (address, _, _) in enumerate(instructions)}, []
    for end, (address, name, operands) in enumerate(instructions):
        if name[0] != "j" or not re.fullmatch(r"[0-9a-f]+", operands):
            continue
        start = places.get(int(operands, 16), end + 1)
        body = instructions[start : end + 1]
        if int(operands, 16) < address and len(body) <= MOST and all(name != "call" for _, name, _ in body):
            found.append(body)
    return found


def choose(found: list[list[Instruction]], loop: Loop) -> list[Instruction]:
    """The shortest loop with the counts of `loop`."""

    def fits(body: list[Instruction]) -> bool:
        counts = collections.Counter(name for _, name, _ in body)
        return all(counts[name] == count for name, count in loop.counts.items())

    return min(filter(fits, found), key=len, default=[])


def assembly(body: list[Instruction]) -> str:
    """The source of a loop; its jumps lead to one label."""
    lines = [f"{name} {'0f' if name[0] == 'j' else operands}" for _, name, operands in body]
    return "\n".join([*lines, "0:", ""])


def simulate(body: list[Instruction], cpu: str, tool: str) -> dict[str, float]:
    """Instructions and cycles of an iteration, and the cycles of its busiest port and of dispatch."""
    command = [tool, "-mtriple=x86_64", f"-mcpu={cpu}", "-iterations=400", "-"]
    run = subprocess.run(command, input=assembly(body), capture_output=True, text=True, check=True)
    total = int(re.search(r"Total Cycles:\s+(\d+)", run.stdout)[1])  # type: ignore[index]
    width = int(re.search(r"Dispatch Width:\s+(\d+)", run.stdout)[1])  # type: ignore[index]
    names = re.findall(r"^\[([\d.]+)\]\s+- (\S+)", run.stdout, re.MULTILINE)
    pressure = run.stdout.split("Resource pressure per iteration:")[1].splitlines()[2].split()
    ports = {name: float(value) for (_, name), value in zip(names, pressure, strict=True) if value != "-"}
    port = max(ports, key=lambda name: ports[name])
    return {"instructions": len(body), "cycles": total / 400, "dispatch": len(body) / width, port: ports[port]}


def main() -> None:
    """Simulate every loop and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", default="znver3", help="as of `llvm-mca -mcpu`")
    parser.add_argument("--gigahertz", type=float, default=3.4)
    parser.add_argument("--tool", default="llvm-mca-19")
    parser.add_argument("--out", type=Path, default=Path("build/simulation.json"))
    options = parser.parse_args()
    found, cycles, figures = loops(disassemble(_core.__file__)), {}, {}
    for name, loop in LOOPS.items():
        body = choose(found, loop)
        if not body:
            raise SystemExit(f"the compiled core has no loop {name!r} with {loop.counts}")
        figures[name] = {"weights": loop.weights, **simulate(body, options.cpu, options.tool)}
        cycles[name] = figures[name]["cycles"] / loop.weights
        print(name, figures[name], flush=True)
    plain = cycles["decode"] + cycles["products"]
    each = {"decode": cycles["decode"], "plain": plain, "dependent": plain + cycles["dependent"]}
    speeds = {f"{name}, 10^9 weights/s": round(options.gigahertz / value, 1) for name, value in each.items()}
    print(speeds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    written = {"processor": options.cpu, "gigahertz": options.gigahertz, "loops": figures, "speeds": speeds}
    options.out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()

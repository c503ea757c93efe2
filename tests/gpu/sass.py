"""Parses kernel machine code: splits nvdisasm output into instructions and basic blocks."""

import re
import subprocess
from collections import Counter
from pathlib import Path

from cuda.pathfinder import find_nvidia_binary_utility

DISASSEMBLER = find_nvidia_binary_utility("nvdisasm")

INTEGER = {"LOP3", "PRMT", "SHF", "IADD3", "VIADD", "LEA", "SEL", "ISETP", "IABS", "VIMNMX", "IMNMX", "SGXT", "MOV"}
"""Opcodes of the integer pipe, which decoding shares; multiplications run in parallel."""

_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+):")


class Kernel:
    """The instructions of a kernel: opcodes with their arguments, and where labels are."""

    def __init__(self, lines):
        self.instructions, self.labels = [], {}
        for line in lines:
            if match := _LABEL.match(line):
                self.labels[match[1]] = len(self.instructions)
            elif match := _LINE.match(line):
                self.instructions.append((match[1], match[2]))

    def count(self, *opcodes):
        return sum(opcode in opcodes for opcode, _ in self.instructions)

    def blocks(self):
        """Opcode counts of each basic block, between labels and branches."""
        found, targets = [Counter()], set(self.labels.values())
        for at, (opcode, _) in enumerate(self.instructions):
            if at in targets:
                found.append(Counter())
            found[-1][opcode] += 1
            if opcode in ("BRA", "BRX", "EXIT", "RET", "CALL"):
                found.append(Counter())
        return found

    def products(self):
        """Opcode counts of the basic block with the most tensor core products, which decodes and multiplies a chunk."""
        return max(self.blocks(), key=lambda block: block["HMMA"] + block["IMMA"] + block["HGMMA"])


def disassemble(cubin: Path) -> dict[str, Kernel]:
    """The kernels of a file of machine code by name."""
    text = subprocess.run([DISASSEMBLER, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^\.text\.(\w+):$", text, flags=re.MULTILINE)
    return {name: Kernel(body.splitlines()) for name, body in zip(parts[1::2], parts[2::2], strict=True)}

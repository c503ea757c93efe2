"""Which packed models a machine can run, and from where: its memory, its GPU, both, or its drive.

A machine is this one, or one that is described in words: `RAM=32GB,GPU=12GB,NVMe`. Memory for keys and values is not
counted, because it depends on the length of the text.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from moepack.memory import available_bytes
from moepack.units import byte_count, size

__all__ = ["DRIVE", "GPU", "GPU_AND_MEMORY", "GPU_PROCESS", "MEMORY", "Machine", "this_machine"]

MEMORY, GPU, GPU_AND_MEMORY, DRIVE = "memory", "GPU", "GPU and memory", "drive"
"""Places of the weights of a packed model that runs."""

GPU_PROCESS = 700 << 20
"""GPU memory in bytes of the CUDA context, the kernels and the activations of one sequence."""

EXAMPLE = "write it as RAM=32GB,GPU=12GB,NVMe"


@dataclass(frozen=True)
class Machine:
    """The resources of a machine.

    Attributes:
        memory: memory for a process in bytes; None if unknown.
        gpu: memory of its GPU in bytes; None without one.
        drive: free bytes of its drive; None if unknown.
        has_drive: whether experts can be read from a fast drive.
        here: whether it is this machine, whose speed may be known.
    """

    memory: int | None
    gpu: int | None
    drive: int | None
    has_drive: bool
    here: bool

    @classmethod
    def described(cls, text: str) -> Machine:
        """Parse a description.

        Args:
            text: settings separated by commas: `RAM=SIZE` (required), `GPU=SIZE`, and `NVMe` or `NVMe=SIZE`, the free
                space of a fast drive. Case and spaces do not matter.

        Raises:
            ValueError: a setting is unknown, repeated, missing, or has no valid size.
        """
        found: dict[str, int | None] = {}
        for part in text.split(","):
            name, equals, value = (each.strip() for each in part.partition("="))
            key = name.upper()
            if key not in ("RAM", "GPU", "NVME"):
                raise ValueError(f"{part.strip()!r}: a machine has RAM, GPU and NVMe; {EXAMPLE}")
            if key in found:
                raise ValueError(f"{name} is given twice; {EXAMPLE}")
            if not equals and key != "NVME":
                raise ValueError(f"{name} needs a size; {EXAMPLE}")
            try:
                found[key] = byte_count(value) if equals else None
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        if "RAM" not in found:
            raise ValueError(f"{text!r} has no RAM; {EXAMPLE}")
        return cls(found["RAM"], found.get("GPU"), found.get("NVME"), "NVME" in found, here=False)

    def places(self, weights: int, streamed: int, process: int) -> tuple[str, ...]:
        """Return the places from which a packed model can run, the fastest first; empty if it does not fit.

        Args:
            weights: bytes of all weights.
            streamed: bytes of the experts, which may stay on the drive.
            process: memory in bytes of the process without weights.
        """
        room = None if self.memory is None else self.memory - process
        board = 0 if self.gpu is None else max(self.gpu - GPU_PROCESS, 0)
        places = []
        if 0 < weights <= board and (room is None or room > 0):
            places.append(GPU)
        if room is not None and weights <= room:
            places.append(MEMORY)
        if not places and board and room is not None and weights <= board + max(room, 0):
            places.append(GPU_AND_MEMORY)
        fits = self.has_drive and (self.drive is None or weights <= self.drive)
        if fits and streamed and room is not None and weights - streamed <= room and MEMORY not in places:
            places.append(DRIVE)
        return tuple(places)

    def __str__(self) -> str:
        parts = [f"{'unknown' if self.memory is None else size(self.memory)} of memory"]
        parts += [f"a GPU with {size(self.gpu)}"] if self.gpu is not None else []
        if self.has_drive:
            parts.append("a drive" + (f" with {size(self.drive)} free" if self.drive is not None else ""))
        return ", ".join(parts)


def this_machine(place: Path) -> Machine:
    """Return what is free on this machine; `place` is on the drive that would hold the model."""
    import torch

    gpu = None
    if torch.cuda.is_available():
        gpu = max(torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count()))
    free = shutil.disk_usage(next(above for above in (place.absolute(), *place.absolute().parents) if above.exists()))
    return Machine(available_bytes(), gpu, free.free, True, here=True)

"""Describes the machine of a measurement; every benchmark stores this with its figures."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

import moepack


def describe(threads: int, device: str = "cpu") -> dict[str, Any]:
    """The processor, memory, versions, thread count and accelerator of this run."""
    cpu = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    }
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    x86 = ("avx2", "avx512f", "avx512_vnni", "avx512vbmi", "avx512_bf16", "amx_int8", "amx_bf16")
    interesting = (*x86, "asimd", "asimddp")
    return {
        "processor": cpu.get("model name", platform.processor()),
        "family": f"{cpu.get('vendor_id', '?')} family {cpu.get('cpu family', '?')} model {cpu.get('model', '?')}",
        "instruction_sets": [flag for flag in interesting if flag in flags],
        "cores": os.cpu_count(),
        "threads": threads,
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "moepack": moepack.__version__,
    }


def save(path: Path, threads: int, figures: Any, device: str = "cpu") -> None:
    """Write the figures as JSON with a description of the machine and of the accelerator, if one was used."""
    write(path, describe(threads, device), figures)


def write(path: Path, description: Any, figures: Any) -> None:
    """Write figures as JSON with a description of the machine that measured them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": description, "figures": figures}, indent=1) + "\n")
    print(f"wrote {path}")

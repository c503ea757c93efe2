"""Speed of uploads: packed bytes a second, from memory to a GPU ready for products, and of the rearrangement before.

PYTHONPATH=python python -m benches.gpu.upload [--families coded] [--only NAME] [--results FILE]
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benches.gpu.cases import FAMILIES, device_name, specifications
from moepack import _core
from moepack.backends.gpu import Uploader, upload
from moepack.backends.gpu.backend import REARRANGED

SHAPE = (8, 14336, 4096)
"""Experts, rows and columns: a projection of a layer of Mixtral-8x7B."""


def seconds(call: Callable[[], Any]) -> float:
    """The least time of three calls."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Run the requested measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--only", nargs="*", default=[""], help="substrings of the names of specifications")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    uploader = Uploader(torch.device("cuda", 0))
    found: dict[str, Any] = {**device_name(), "threads": _core.threads(), "isa": _core.isa(), "lines": []}
    for name, make in specifications(options.families).items():
        if not any(part in name for part in options.only):
            continue
        data = make(*SHAPE, 1)
        rearrange = REARRANGED.get(_core.PackedTensor(data).kind)
        took = {"upload": seconds(lambda data=data: upload(torch.from_numpy(data), uploader))}
        if rearrange:
            took["rearrange"] = seconds(lambda data=data, rearrange=rearrange: rearrange(data))
        rates = {what: round(len(data) / time / 1e9, 2) for what, time in took.items()}
        found["lines"].append({"specification": name, "bytes": len(data), "gb_per_s": rates})
        print(f"{name:28}", rates, flush=True)
    if options.results:
        options.results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

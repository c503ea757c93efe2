"""Measures methods with other values of constants that were chosen by experiment.

    python -m benches.studies.constants MODEL --texts FILE ... [--source built-in] [--bits 3] [--set NAME=VALUE ...]
        [--method auto] [--arguments JSON] [--device cuda] --results FILE

Each run compresses MODEL once, with the given values in place of the package's, and scores it beside the original. One
line of JSON is appended to the results per run, so that runs can share a file.

| name | constant |
|---|---|
| `price` | bits against squared error in rounding, relative to the price that minimizes the squared error |
| `drift` | share of the error of earlier layers that is corrected by moving the weights |
| `damping`, `drift_damping` | damping of Hessians and of that correction, relative to the mean diagonal |
| `exponent` | exponent of F in the factors of rows and columns, times two |
| `ridge` | increase of the diagonal of a Hessian, times columns over tokens |
| `dependent` | bits per weight from which dependent codes replace plain ones |
| `grid_drift`, `grid_drift_damping` | `drift` and `drift_damping` of `finequant` with a text |
| `grid_damping` | damping of Hessians of `finequant` with a text |

`--bits` is the size of the whole model for `auto`. Other methods take their settings from `--arguments`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import wraps
from pathlib import Path
from typing import Any

import torch

import moepack
from benches.quality.sensitivity import loaded
from benches.tools.scores import SCORED, Scores
from moepack.format import PackedDirectory
from moepack.methods import create
from moepack.methods.finequant import solving
from moepack.methods.rate import layer, scales
from moepack.pipeline.report import Sizes
from moepack.solvers import integers, priced, uniform

FIELDS = {"drift": "shift", "damping": "damping", "drift_damping": "shift_damping"}
"""Constants that are defaults of `UniformSettings`."""


def put(before: float, after: float, name: str) -> None:
    """Replace a constant in all modules of the package that bind it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("moepack") and getattr(module, name, None) == before:
            setattr(module, name, after)


def use(name: str, value: float) -> None:
    """Use another value of a constant."""
    if name == "price":
        for constant in ("WORTH", "WORTH_OF_DEPENDENT"):
            before = getattr(priced, constant)
            put(before, before * value * priced.PRICE / (0.15 * priced.PRICE), constant)
        default(uniform.UniformSettings, "worth", 0.15 * priced.PRICE, value * priced.PRICE)
    elif name in FIELDS:
        field = FIELDS[name]
        default(uniform.UniformSettings, field, getattr(uniform.UniformSettings, field), value)
    elif name == "exponent":
        put(scales.SHARE, value, "SHARE")
    elif name == "ridge":
        put(layer.RIDGE, value, "RIDGE")
    elif name == "dependent":
        put(priced.LEAST_DEPENDENT, value, "LEAST_DEPENDENT")
    elif name == "grid_drift":
        solving.SHIFT = value
    elif name == "grid_drift_damping":
        solving.SHIFT_DAMPING = value
    elif name == "grid_damping":
        default(integers.IntegerSettings, "damping", integers.IntegerSettings.damping, value)
    else:
        raise SystemExit(f"unknown constant {name!r}")


def default(settings: type, field: str, before: float, after: float) -> None:
    """Replace a value of a class of settings, whoever makes the settings."""
    original = settings.__init__

    @wraps(original)
    def start(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        if getattr(self, field) == before:
            object.__setattr__(self, field, after)

    settings.__init__ = start  # type: ignore[misc]


def main() -> None:
    """Compress, score, and append a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="evaluation texts")
    parser.add_argument("--source", default="built-in", help="calibration text")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--arguments", type=json.loads, default={}, help="settings of the method")
    parser.add_argument("--bits", type=float, default=3.0)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--windows", type=int, default=SCORED, help="windows per evaluation text")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    chosen = {name: float(value) for name, value in (each.split("=") for each in options.set)}
    for name, value in chosen.items():
        use(name, value)
    start = time.perf_counter()
    asked = {"calibration": options.source, "device": options.device} | options.arguments
    if options.method == "auto":
        asked = {"bits_per_weight": options.bits, "prefer": "quality"} | asked
    method = create(options.method, **asked)
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder) / "packed"
        moepack.compress(options.model, packed, method=method, check=False)
        seconds = round(time.perf_counter() - start)
        sizes = Sizes.of(PackedDirectory.open(packed).manifest.packed().values())
        # The CPU rounds activations as CodeQuant's packed layers do.
        scored_on = "cpu" if options.method == "codequant" else options.device
        scores = Scores(options.model, options.texts, scored_on, options.windows)
        found = scores.of(loaded(packed, scored_on))
    row = {"model": options.model.name, "method": options.method, "arguments": options.arguments}
    row |= {"packed_bits": round(sizes.bits_per_weight, 4), "source": Path(options.source).stem}
    row["device"] = options.device if options.device == "cpu" else torch.cuda.get_device_name(options.device)
    line = json.dumps({**row, "set": chosen, "seconds": seconds, **found})
    print(line, flush=True)
    with options.results.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()

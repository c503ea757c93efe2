"""Measures the claims of the five papers on a pretrained model: the tables of docs/claims.md.

    python -m benches.quality.claims MODEL --calibration FILE --texts FILE ... --results FILE [--only CLAIM ...]
        [--settings NAME ...] [--windows 8] [--samples 16] [--threads 1] [--device cuda]
    python -m benches.quality.claims table --results FILE

MODEL is a Mixture-of-Experts checkpoint, such as `python -m benches.tools.real OUT` makes. Each setting is compressed
by `moepack.compress`, loaded by `moepack.load`, and scored beside the original: increase of the loss and divergence, on
windows of 512 tokens from the beginning of each text. Products are exact, but for CodeQuant's, which round activations.
Methods that calibrate read `--samples` windows of the calibration text. Bits a weight count all metadata, of the
experts and of everything that is packed.

A setting that uses another setting's bytes as its budget comes after it. Rows are saved one by one, and existing rows
are not measured again. Settings take turns by claim, the most informative first, so that a run may be cut off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import moepack
from benches.tools import machine
from benches.tools.scores import Kept, Scores
from moepack import _core
from moepack.format import PackedDirectory
from moepack.methods import METHODS, Method, create
from moepack.methods.qmoe import PUBLISHED
from moepack.pipeline.report import Sizes, Totals
from moepack.solvers.rtn import quantize_ternary

CALIBRATED = ("qmoe", "codequant", "floe")
"""Methods that read the calibration text."""
NORMAL_ROWS = 4096
"""Independent normal rows whose ternary codes are compared with the model's."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """A model's part and the method that compresses it.

    Attributes:
        method: its name.
        arguments: its arguments, but for the calibration text.
        bytes_of: the setting of the same claim whose bits per weight, of everything packed, are this one's budget.
    """

    method: str
    arguments: dict[str, Any] = field(default_factory=dict)
    bytes_of: str | None = None


def groups(bits: int, size: int | str, **more: Any) -> Setting:
    """Integers in groups."""
    return Setting("finequant", {"bits": bits, "group_size": size} | more)


def finequant(bits: int) -> dict[str, Setting]:
    """Fixed sizes, the paper's rule, and a budget of the bytes of one of them."""
    found = {f"fixed, {size}": groups(bits, size) for size in (64, 16)}
    found |= {"adaptive, alpha 0.35": groups(bits, "adaptive", alpha=0.35), "fixed, 128": groups(bits, 128)}
    found |= {"adaptive, alpha 0.25": groups(bits, "adaptive", alpha=0.25), "fixed, row": groups(bits, "row")}
    found["fixed, 32"] = groups(bits, 32)
    budget = {"bits": bits, "group_size": "budget"}
    for other in ("adaptive, alpha 0.35", "fixed, 64"):
        found[f"budget of the bytes of {other}"] = Setting("finequant", budget, f"{bits} bits: {other}")
    return {f"{bits} bits: {name}": setting for name, setting in found.items()}


MILO_GROUPS = {"bits": 3, "group_size": "budget", "dense_bits": 3}
MILO_SHARE = "5 % of the packed part"
"""A budget is a share of all files: 2.25 % of SmolLM2's, whose embedding keeps 16 bits, are so much of the rest."""
ROUNDED = {"start": "uniform", "steps": 0, "drift": 0.0}
"""CodeQuant's codes and layout with 16 values at even distances: rounding to nearest."""
UNREAD = {"samples": 1}
"""A text for methods that require one without using it."""


def codequant(activation_bits: int) -> dict[str, Setting]:
    """Rotation and clustering, each on and off, with 4-bit weights."""
    corners = {
        "rounded": ROUNDED | UNREAD | {"rotation": "none"},
        "rotated, clustered": {"rotation": "learned"},
        "clustered": {"rotation": "none"},
        "rotated, rounded": ROUNDED | {"rotation": "learned"},
    }
    common = {"weight_bits": 4, "activation_bits": activation_bits}
    found = {name: common | {"hadamard": False} | each for name, each in corners.items()}
    if activation_bits == 4:
        found["rotated, clustered, online Hadamard"] = common | {"hadamard": True, "rotation": "learned"}
    return {f"W4 A{activation_bits}: {name}": Setting("codequant", each) for name, each in found.items()}


def floe(sparsity: float, **more: Any) -> Setting:
    """Skip channels below thresholds; without `more`, weights are nearly exact."""
    return Setting("floe", {"paper_form": True, "sparsity": sparsity} | ({"up_bits": 8, "bits": 16} | more))


CLAIMS: dict[str, dict[str, Setting]] = {
    "qmoe": {
        "ternary, as published": Setting("qmoe", dict(PUBLISHED)),
        "2 bits, g64, rounded": Setting("qmoe", {"bits": "2", "solver": "rtn"} | UNREAD),
        "2 bits, g64, as published": Setting("qmoe", {"bits": "2"} | PUBLISHED),
        "ternary, here": Setting("qmoe"),
        "2 bits, g64, here": Setting("qmoe", {"bits": "2"}),
        "2 bits, g64, here, three quarters of the drift": Setting("qmoe", {"bits": "2", "drift": 0.75}),
        "2 bits, g64, here, no drift": Setting("qmoe", {"bits": "2", "drift": 0.0}),
    },
    "milo": {
        "rounded": Setting("milo", {"solver": "rtn", "rank": "uniform:0"}),
        "compensators, 5 % of all files": Setting("milo", {"rank": "budget:5"}),
        f"compensators, {MILO_SHARE}": Setting("milo", {"rank": "budget:2.25"}),
        "no compensators, smaller groups": Setting("finequant", MILO_GROUPS, f"compensators, {MILO_SHARE}"),
        "no compensators, least squares": Setting("milo", {"solver": "lsq", "rank": "uniform:0"}),
        "no compensators, smaller groups with offsets": Setting(
            "finequant", MILO_GROUPS | {"symmetric": False}, f"compensators, {MILO_SHARE}"
        ),
        "no compensators, groups of the bytes of 5 % of all files": Setting(
            "finequant", MILO_GROUPS, "compensators, 5 % of all files"
        ),
        "no compensators, groups with offsets of these bytes": Setting(
            "finequant", MILO_GROUPS | {"symmetric": False}, "compensators, 5 % of all files"
        ),
        "compensators, HQQ, dense:24+kurtosis:8": Setting(
            "milo", {"solver": "hqq", "rank": "dense:24+kurtosis:8", "refine": False}
        ),
        "no compensators, HQQ": Setting("milo", {"solver": "hqq", "rank": "uniform:0"}),
    },
    "finequant": finequant(3) | finequant(4),
    "codequant": codequant(4) | codequant(8),
    "floe": {f"threshold, {share:.0%}": floe(share) for share in (0.8, 0.5, 0.9, 0.7, 0.0)}
    | {
        "the paper's form, 80 %": floe(0.8, up_bits=2, solver="hqq"),
        "the paper's form, nothing skipped": floe(1e-3, up_bits=2, solver="hqq"),
        "coarse copies of 2 bits, 80 %": Setting("floe", {"coarse_bits": 2.0, "sparsity": 0.8, "bits": 4}),
        "coarse copies of 2 bits, 100 %": Setting("floe", {"coarse_bits": 2.0, "sparsity": 1.0, "bits": 4}),
    },
}
"""By claim, the settings by name, the most informative first."""


class Bench:
    """One model, its texts, and the measured rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows = read(options.results)
        self.scores = Scores(options.model, options.texts, "cpu", options.windows)
        self.scores.original = Kept(self.scores.original)

    def find(self, claim: str, name: str) -> Row | None:
        """The row of a setting, if it was measured the same way."""
        key = self.key(claim, name)
        return next((row for row in self.rows if key.items() <= row.items()), None)

    def key(self, claim: str, name: str) -> Row:
        """The fields that identify a row."""
        setting, options = CLAIMS[claim][name], self.options
        found = {"claim": claim, "setting": name, "model": options.model.name, "windows": options.windows}
        if setting.method in CALIBRATED:
            found |= {"calibration": options.calibration.name, "samples": options.samples}
        return found | {"method": setting.method, "arguments": setting.arguments, "bytes_of": setting.bytes_of}

    def run(self, only: list[str], settings: list[str]) -> None:
        """Measure the missing rows, one setting per claim at a time."""
        turns = [[(claim, name) for name in CLAIMS[claim] if not settings or name in settings] for claim in only]
        for claim, name in itertools.chain.from_iterable(map(filter_none, itertools.zip_longest(*turns))):
            if self.find(claim, name) is None:
                row = self.key(claim, name) | self.measured(claim, CLAIMS[claim][name])
                print(json.dumps(row), flush=True)
                self.rows.append(row)
                machine.save(self.options.results, self.options.threads, {"rows": self.rows})

    def measured(self, claim: str, setting: Setting) -> Row:
        """Compress, load and score."""
        method = self.method(claim, setting)
        with tempfile.TemporaryDirectory() as folder:
            start, out = time.perf_counter(), Path(folder) / "packed"
            report = moepack.compress(self.options.model, out, method=method)
            seconds = time.perf_counter() - start
            opened = PackedDirectory.open(out)
            model = moepack.load(out, dtype="float32", mode="auto" if setting.method == "codequant" else "exact")
            scores = self.scores.of(model)
            records = opened.manifest.packed().values()
            return {
                "seconds": round(seconds, 1),
                "bits": Totals.of(opened.manifest).experts.bits_per_weight,
                "packed_bits": Sizes.of(records).bits_per_weight,
                "scores": scores, **details(opened, model), "notes": report.notes,
            }  # fmt: skip

    def method(self, claim: str, setting: Setting) -> Method:
        """The method with its text or its budget."""
        arguments: dict[str, Any] = {"calibration": "none"}
        if setting.method in CALIBRATED:
            arguments = {"calibration": str(self.options.calibration), "samples": self.options.samples}
        arguments |= setting.arguments
        if setting.bytes_of is not None:
            other = self.find(claim, setting.bytes_of)
            assert other is not None, f"{setting.bytes_of} comes first"
            arguments["bits_per_weight"] = other["packed_bits"]
        if "device" in METHODS[setting.method].__dataclass_fields__:
            arguments["device"] = self.options.device
        return create(setting.method, **arguments)


def filter_none(turn: tuple[tuple[str, str] | None, ...]) -> Iterator[tuple[str, str]]:
    return (each for each in turn if each is not None)


def details(opened: PackedDirectory, model: Any) -> Row:
    """Further figures of a claim: codes of ternary tensors, group sizes, channels skipped on the scored texts."""
    records, found = opened.manifest.packed(), {}
    if all(record.kind == "ternary" for record in records.values()):
        codes = [(opened.blob(name).decode(), opened.blob(name).parameters("levels")) for name in records]
        found["codes"] = entropy(np.concatenate([code.ravel() for code, _ in codes])) | {
            code: round(stored_bits(codes, code), 4) for code in ("fsv8", "dict16")
        }
        found["normal codes"] = normal({record.shape for record in records.values()})
    sizes = Counter(str(r.details["group_size"]) for r in records.values() if "group_size" in r.details)
    sparse = [module for module in model.modules() if getattr(module, "asked", 0)]
    if sparse:
        found["skipped"] = round(1 - sum(each.computed for each in sparse) / sum(each.asked for each in sparse), 4)
    return found | ({"group sizes": dict(sizes)} if sizes else {})


def entropy(codes: NDArray[np.int8]) -> dict[str, float]:
    """The share of zeros, and the entropy of a single code in bits."""
    shares = np.bincount(codes.astype(np.int64) + 1, minlength=3) / codes.size
    bits = -sum(float(share) * math.log2(share) for share in shares if share > 0)
    return {"zeros": round(float(shares[1]), 4), "entropy": round(bits, 4)}


def stored_bits(tensors: list[tuple[NDArray[Any], NDArray[Any]]], code: str) -> float:
    """Bits per weight of codes and levels in an entropy code, with all metadata."""
    nbytes = sum(_core.encode_ternary(codes, levels, ndim=3, code=code).nbytes for codes, levels in tensors)
    return 8 * nbytes / sum(codes.size for codes, _ in tensors)


def normal(shapes: set[tuple[int, int, int]]) -> dict[str, float]:
    """Statistics of the rounded codes of independent normal weights, with rows of the model's length."""
    generator, parts = torch.Generator().manual_seed(0), []
    for _, _, columns in sorted(shapes):
        rows = torch.randn(NORMAL_ROWS, columns, generator=generator)
        parts.append(quantize_ternary(rows, name="normal")[0].numpy().ravel())
    return entropy(np.concatenate(parts))


def read(results: Path) -> list[Row]:
    """The rows of a file, if it exists."""
    found: list[Row] = json.loads(results.read_text())["figures"]["rows"] if results.exists() else []
    return found


def table(rows: list[Row]) -> str:
    """The rows by claim, in the order of the settings, as Markdown."""
    texts = list(rows[0]["scores"])
    lines = []
    for claim, settings in CLAIMS.items():
        mine = [row for name in settings for row in rows if (row["claim"], row["setting"]) == (claim, name)]
        extra, cell = EXTRA.get(claim, ("", lambda row, rows: ""))
        lines += [
            "",
            f"| {claim} | bits, experts | bits, packed | increase: {', '.join(texts)} | divergence | {extra} |",
        ]
        lines += ["|---|---|---|---|---|---|"]
        for row in mine:
            figures = [
                ", ".join(format(score[figure], form) for score in row["scores"].values())
                for figure, form in (("increase", "+.3f"), ("divergence", ".3f"))
            ]
            cells = [row["setting"], f"{row['bits']:.3f}", f"{row['packed_bits']:.3f}", *figures, cell(row, mine)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def codes_cell(row: Row, rows: list[Row]) -> str:
    """Zeros and bits of ternary codes."""
    found = row.get("codes")
    return f"{found['zeros']:.1%}, {found['entropy']:.3f}, {found['dict16']:.3f}" if found else ""


def over_fixed(row: Row, rows: list[Row]) -> str:
    """Divergence relative to that of fixed sizes of equal bytes, interpolated between two of them."""
    bits = row["setting"][:6]
    fixed = sorted((each["bits"], divergence(each)) for each in rows if each["setting"].startswith(f"{bits}: fixed"))
    if "fixed, " in row["setting"] and "budget" not in row["setting"]:
        return ""
    return f"{divergence(row) / float(np.interp(row['bits'], *zip(*fixed, strict=True))):.2f}x"


def divergence(row: Row) -> float:
    """The mean over the texts."""
    return float(np.mean([score["divergence"] for score in row["scores"].values()]))


EXTRA: dict[str, tuple[str, Callable[[Row, list[Row]], str]]] = {
    "qmoe": ("zeros, entropy, dict16", codes_cell),
    "finequant": ("over fixed sizes", over_fixed),
    "floe": ("skipped", lambda row, rows: f"{row['skipped']:.1%}" if "skipped" in row else ""),
}
"""An additional table column per claim: its heading, and its value for a row given all rows of the claim."""


def main() -> None:
    """Measure the missing rows, or print the measured ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint, or the word `table`")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--texts", type=Path, nargs="+", default=[], help="evaluation texts")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=CLAIMS, default=list(CLAIMS))
    parser.add_argument("--settings", nargs="+", default=[], help="names of settings; default: all")
    parser.add_argument("--windows", type=int, default=8, help="windows per evaluation text")
    parser.add_argument("--samples", type=int, default=16, help="calibration windows")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="device that compresses; models are scored on the CPU")
    options = parser.parse_args()
    if str(options.model) == "table":
        print(table(read(options.results)))
        return
    torch.set_num_threads(options.threads)
    _core.set_threads(options.threads)
    Bench(options).run(options.only, options.settings)


if __name__ == "__main__":
    main()

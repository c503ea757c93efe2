"""Compares CodeQuant with rounding and k-means: loss increase by bits of weights and activations, as tables.

    python -m benches.quality.codequant MODEL ... --calibration TEXT --text TEXT --rows-file FILE [--bits 4x8 4x4 ...]
        [--blocks row 128] [--rows NAME ...] [--jobs N] [--device cuda]
    python -m benches.quality.codequant --cells FILE ...        # lines of "MODEL BITS BLOCK ROW"
    python -m benches.quality.codequant ... --also TEXT ...     # trials of settings, also measured on further texts
    python -m benches.quality.codequant --rows-file FILE        # only the tables
    python -m benches.quality.codequant MODEL ... --rows-file FILE --recount    # bits per weight by the current layout

Every cell packs the model's experts and linear layers (attention, shared experts, dense feed-forward layers) and
measures the packed model: on the CPU with the runtime, on another device by `moepack.tuning.thaw`, which computes the
same with torch (`tests/pipeline/test_tuning.py`; the cell "runtime" measures both). A row that ends in ", tuned" is the
packed model of the row before the comma with fine-tuned centroids, ", tuned without KL" the same without the routers'
term. Finished cells are appended to the file immediately and are not measured again, so long runs can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import moepack
from benches.quality.codequant_tables import Tables
from benches.tools import machine
from moepack.backends.threads import set_threads
from moepack.checkpoint import Checkpoint, describe
from moepack.evaluation.windows import read_windows
from moepack.format import PackedDirectory
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.methods import CodeQuant
from moepack.pipeline import compress
from moepack.pipeline.tune import tune
from moepack.tuning import TuneSettings, listening, thaw

ROUNDED = {"start": "uniform", "steps": 0, "rotation": "none", "hadamard": False, "drift": 0.0}
CLUSTERED = {"steps": 0, "rotation": "none", "hadamard": False, "drift": 0.0}
ROWS: dict[str, dict[str, Any]] = {
    "RTN": ROUNDED,
    "RTN, random rotation": {**ROUNDED, "rotation": "random"},
    "RTN, random rotation, online Hadamard": {**ROUNDED, "rotation": "random", "hadamard": True},
    "k-means": {**CLUSTERED, "weighted": False},
    "k-means, Hessian weights": CLUSTERED,
    "CodeQuant": {},
    "no online Hadamard": {"hadamard": False},
    "online Hadamard": {"hadamard": True},
    "no rotation": {"rotation": "none"},
    "random rotation": {"rotation": "random"},
    "no Hessian weights": {"weighted": False},
    "no refinement": {"steps": 0},
    "equation 8": {"assignment": "diagonal"},
    "drift 0": {"drift": 0.0},
    "drift 0.5": {"drift": 0.5},
    "drift 0.75": {"drift": 0.75},
    "drift 1": {"drift": 1.0},
    "drift 0.75, no Hessian weights": {"drift": 0.75, "weighted": False},
    "permutation": {"permute": True},
    "tokens weighted equally": {"weigh_tokens": False},
}
TUNED, PLAIN = ", tuned", ", tuned without KL"
CHANGED = 50
"""Windows on which the change of routes is counted, as in the paper (appendix A.7)."""


def base(row: str) -> str:
    """The row whose packed model this row starts from."""
    return row.removesuffix(PLAIN).removesuffix(TUNED)


class Group:
    """Cells that share a packed model."""

    def __init__(self, model: Path, bits: str, block: str, rows: list[str], options: argparse.Namespace) -> None:
        self.model, self.bits, self.block, self.rows, self.options = model, bits, block, rows, options

    def run(self) -> None:
        """Pack once, measure every row, and append the results."""
        set_threads(self.options.threads)
        with tempfile.TemporaryDirectory() as directory:
            packed, seconds = Path(directory) / "packed", time.perf_counter()
            report = compress(self.model, packed, method=self._method())
            seconds = time.perf_counter() - seconds
            for row in self.rows:
                started, found = time.perf_counter(), packed
                if row != base(row):
                    found = Path(directory) / row
                    self._tune(packed, found, 0.0 if row.endswith(PLAIN) else 1.0)
                spent = time.perf_counter() - started + seconds
                self._append(row, report, found, spent)

    def _method(self) -> CodeQuant:
        weight_bits, activation_bits = map(int, self.bits.split("x"))
        settings = {**ROWS[base(self.rows[0])]}
        if activation_bits == 16:
            settings.pop("hadamard", None)
        common = {"calibration": str(self.options.calibration), "samples": self.options.samples}
        common |= {"block": self.block, "device": self.options.device}
        return CodeQuant(**common, weight_bits=weight_bits, activation_bits=activation_bits, **settings)

    def _tune(self, packed: Path, out: Path, weight: float) -> None:
        steps = TuneSettings(steps=self.options.tune_steps, rate=self.options.rate, router_weight=weight)
        samples = {"calibration": str(self.options.calibration), "samples": self.options.tune_samples}
        tune(packed, self.model, out, settings=steps, device=self.options.device, **samples)

    def _append(self, row: str, report: Any, packed: Path, seconds: float) -> None:
        loss, changed = measure(packed, self.model, self.options)
        manifest = PackedDirectory.open(packed).manifest
        objectives = [record.details["objective"] for record in manifest.packed().values()]
        line = {"model": self.model.name, "bits": self.bits, "block": self.block, "row": row, "loss": loss}
        line |= {"routes_changed": changed, "bits_per_weight": report.bits_per_weight, "seconds": round(seconds, 1)}
        if self.options.also:
            line["also"] = losses(packed, self.model, self.options)
        line["objective"] = [sum(o[i] for o in objectives) / len(objectives) for i in (0, -1)]
        line["tuning"] = manifest.settings.get("tuning")
        if row == "CodeQuant" and self.options.device != "cpu" and self.bits == "4x4":
            line["runtime"] = moepack.evaluate(packed, self.options.text, 20_000).loss
            line["simulated"] = measure(packed, self.model, self.options, 20_000)[0]
        append(self.options, line)


def measure(packed: Path, original: Path, options: argparse.Namespace, chars: int = 0) -> tuple[float, float]:
    """Loss on the text, and the share of expert choices that differ from the original's, averaged over layers."""
    model, tokenizer = loaded(packed, options), open_tokenizer(original)
    chars = chars or options.chars
    loss = moepack.evaluate(model, options.text, chars, tokenizer=tokenizer).loss
    teacher = opened(original, options)
    windows = torch.from_numpy(read_windows(Path(options.text), chars, tokenizer).ids)[:CHANGED]
    shares = []
    with torch.inference_mode(), listening(teacher) as expected, listening(model) as found:
        for batch in windows.to(options.device).split(8):
            for run in (teacher, model):
                run(input_ids=batch, use_cache=False)
            shares += [changed(*pair, top=top_k(teacher)) for pair in zip(expected, found, strict=True)]
            expected.clear()
            found.clear()
    return loss, sum(shares) / len(shares)


def losses(packed: Path, original: Path, options: argparse.Namespace) -> dict[str, float]:
    """Loss on the further texts, by name."""
    model, tokenizer = loaded(packed, options), open_tokenizer(original)
    return {t.stem: moepack.evaluate(model, t, options.chars, tokenizer=tokenizer).loss for t in options.also}


def loaded(packed: Path, options: argparse.Namespace) -> Any:
    """The packed model: on the CPU the runtime, on another device torch's equivalent."""
    model = moepack.load(packed, dtype=torch.float32)
    if options.device != "cpu":
        thaw(model)
        model.to(options.device).requires_grad_(False)
    return model


def opened(original: Path, options: argparse.Namespace) -> Any:
    """The original model on the device; not every device has grouped products of float32."""
    model = open_model(original, torch.float32).to(options.device)
    if options.device != "cpu":
        model.set_experts_implementation("eager")
    return model


def top_k(model: Any) -> int:
    """The number of experts per token."""
    return int(model.config.num_experts_per_tok)


def changed(expected: torch.Tensor, found: torch.Tensor, top: int) -> float:
    """The share of the `top` experts of one router's logits [T, E] that another router's logits do not select."""
    chosen = [torch.zeros_like(part).scatter_(1, part.topk(top).indices, 1) for part in (expected, found)]
    return 1 - float((chosen[0] * chosen[1]).sum()) / (len(expected) * top)


def append(options: argparse.Namespace, line: dict[str, Any]) -> None:
    """Add a line to the results, in one write."""
    line = {**line, "machine": machine.describe(options.threads, options.device)}
    with open(options.rows_file, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
    print(line["model"], line["bits"], line["block"], line["row"], line["loss"], line.get("seconds"), flush=True)


def lines(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results so far."""
    file = options.rows_file
    return [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []


def wanted(options: argparse.Namespace) -> list[tuple[Path, str, str, str]]:
    """Model, bits, block and row of each cell, in order."""
    if options.cells is not None:
        models = {model.name: model for model in options.models}
        parts = [line.split(maxsplit=3) for line in options.cells.read_text().splitlines() if line.strip()]
        return [(models[name], bits, block, row) for name, bits, block, row in parts if name in models]
    return [
        (model, bits, block, row)
        for model in options.models
        for bits in options.bits
        for block in options.blocks
        for row in options.rows
    ]


def groups(options: argparse.Namespace) -> list[Group]:
    """The cells to measure, grouped by packed model, in the order of the first cell of each group."""
    done = {(line["model"], line["bits"], line["block"], line["row"]) for line in lines(options)}
    found: dict[tuple[Path, str, str, str], list[str]] = {}
    for model, bits, block, row in wanted(options):
        if (model.name, bits, block, row) not in done:
            found.setdefault((model, bits, block, base(row)), []).append(row)
    return [Group(model, bits, block, rows, options) for (model, bits, block, _), rows in found.items()]


def original(model: Path, options: argparse.Namespace) -> None:
    """Measure the model itself."""
    loaded, tokenizer = opened(model, options), open_tokenizer(model)
    loss = moepack.evaluate(loaded, options.text, options.chars, tokenizer=tokenizer).loss
    append(options, {"model": model.name, "bits": "16x16", "block": "row", "row": "original", "loss": loss})


def stored_bits(model: Path, bits: str, block: str) -> float:
    """The bits per weight that `compress` reports for a model's experts, from their shapes: only bits and block
    change the layout (docs/format.md, section 7)."""
    weight_bits, activation_bits = map(int, bits.split("x"))
    method = CodeQuant(calibration="", weight_bits=weight_bits, activation_bits=activation_bits, block=block)
    shapes = [part.shape for layer in describe(Checkpoint.open(model)).layers for part in layer.projections]
    return 8 * sum(map(method.bound, shapes)) / sum(map(math.prod, shapes))


def recount(options: argparse.Namespace) -> None:
    """Write the layout's bits per weight into all rows of the given models; losses do not change."""
    models = {model.name: model for model in options.models}
    found = lines(options)
    for line in found:
        if "bits_per_weight" in line and line["model"] in models:
            line["bits_per_weight"] = stored_bits(models[line["model"]], line["bits"], line["block"])
    options.rows_file.write_text("".join(json.dumps(line) + "\n" for line in found))


def main() -> None:
    """Measure the missing cells and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--also", nargs="*", type=Path, default=[], help="additional evaluation texts")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tune-samples", type=int, default=512)
    parser.add_argument("--tune-steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=TuneSettings.rate)
    parser.add_argument("--chars", type=int, default=250_000)
    parser.add_argument("--blocks", nargs="*", default=["row"], help="row, or columns that share a codebook")
    parser.add_argument("--bits", nargs="*", default=["4x8", "4x4"], help="weight bits x activation bits")
    parser.add_argument("--rows", nargs="*", default=list(ROWS)[:6])
    parser.add_argument("--cells", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows-file", type=Path, default=Path("build/codequant.jsonl"))
    parser.add_argument("--recount", action="store_true", help="only correct the rows' bits per weight")
    options = parser.parse_args()
    if options.recount:
        recount(options)
        return
    options.rows_file.parent.mkdir(parents=True, exist_ok=True)
    known = {line["model"] for line in lines(options) if line["row"] == "original"}
    for model in options.models:
        if model.name not in known:
            original(model, options)
    work = groups(options)
    if options.jobs == 1:
        for group in work:
            group.run()
    else:
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            for future in [pool.submit(group.run) for group in work]:
                future.result()
    print(Tables(lines(options)).text())


if __name__ == "__main__":
    main()

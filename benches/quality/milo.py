"""Measures the gain of low-rank compensators (docs/methods/milo.md): loss increase by method, rank policy and bytes.

    python -m benches.quality.milo MODEL... --texts TEST.txt BOOKS.txt --calibration CALIBRATION.txt --rows rows.jsonl
    python -m benches.quality.milo --rows rows.jsonl --json benches/results/milo.json --tables

Everything is packed as by `moepack compress`: experts, attention, shared experts and dense layers, in groups of 64;
bytes are those of the packed tensors. The packed values are then put into transformers' own model and measured by
`moepack.evaluate`. Rows are appended as they are measured and are not measured again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benches.tools import machine
from moepack import compress, evaluate
from moepack.calibration import CalibrationSettings, Calibrator, Stage
from moepack.calibration.load import load_samples
from moepack.checkpoint import Checkpoint, describe
from moepack.format import PackedDirectory
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.methods.milo import Milo
from moepack.methods.milo.packing import packed_bytes
from moepack.methods.milo.planning import DENSE_ROLES, find_sources
from moepack.solvers.gptq import GptqSettings, gptq
from moepack.solvers.grids import AffineGrid

Job = Callable[[], Any]

PARTS = ("int3", "policies", "factors", "int2", "weights")


class Bench:
    """One model, its texts, and the rows measured so far."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path, self.options = path, options
        self.checkpoint = Checkpoint.open(path)
        self.layout = describe(self.checkpoint)
        self.tokenizer = open_tokenizer(path)
        self.model = open_model(path, torch.float32).to(options.device)
        self.rows = read_rows(options.rows)
        self.losses = self.measured("original", lambda: {})["loss"]

    def find(self, label: str) -> dict[str, Any] | None:
        """The row with this label, if it was measured."""
        found = (row for row in self.rows if (row["model"], row["label"]) == (self.path.name, label))
        return next(found, None)

    def measured(self, label: str, prepare: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row with this label; `prepare` sets the model's weights and returns their figures."""
        found = self.find(label)
        if found is None:
            start = time.perf_counter()
            about = prepare()
            about["seconds"] = round(time.perf_counter() - start, 1)
            loss = {
                text.stem: evaluate(self.model, text, self.options.chars, tokenizer=self.tokenizer).loss
                for text in self.options.texts
            }
            found = {"model": self.path.name, "label": label, "loss": loss, **about}
            with open(self.options.rows, "a") as stream:
                stream.write(json.dumps(found) + "\n")
            self.rows.append(found)
            print(json.dumps(found), flush=True)
        return found

    def packed(self, label: str, **settings: Any) -> dict[str, Any]:
        """Compress with `milo` and measure."""

        def prepare() -> dict[str, Any]:
            with tempfile.TemporaryDirectory() as directory:
                out = Path(directory) / "out"
                compress(self.path, out, method=Milo(**settings))
                opened = PackedDirectory.open(out)
                records = opened.manifest.packed()
                for name in records:
                    self.put(records[name], torch.from_numpy(opened.blob(name).dequantize()))
                files = sum(file.stat().st_size for file in out.glob("*.safetensors"))
            told = {name: Path(value).name if name == "calibration" else value for name, value in settings.items()}
            about = {"settings": told, "bytes": sum(r.nbytes for r in records.values()), "files": files}
            return {**about, **errors(records.values())}

        return self.measured(label, prepare)

    @torch.no_grad()
    def put(self, record: Any, values: Tensor) -> None:
        """Set the model's weights to values [E, R, C]."""
        module = self.model.get_submodule(record.module)
        if not record.experts:
            module.weight.copy_(values[0])
        elif record.projection == "down_proj":
            module.down_proj.copy_(values)
        else:
            first = 0 if record.projection == "gate_proj" else record.shape[1]
            module.gate_up_proj[:, first : first + record.shape[1]].copy_(values)

    def plain(self, bits: int) -> dict[str, Any]:
        """Rounding to nearest."""
        return self.packed(f"int{bits} rtn", bits=bits, solver="rtn", rank="uniform:0")

    def budget(self, bits: int, percent: float, **more: Any) -> dict[str, Any]:
        """The budget policy with additional bytes, in percent of the plain packed bytes."""
        plain = self.plain(bits)
        memory = int(plain["files"] + plain["bytes"] * percent / 100)
        words = ["calibrated" if key == "calibration" else f"{key} {value}" for key, value in more.items()]
        label = " ".join([f"int{bits} budget +{percent:g}%", *words])
        return self.packed(label, bits=bits, memory_budget=memory, **more)

    def gptq(self, bits: int) -> dict[str, Any]:
        """Block by block, each on the outputs of the quantized blocks before it, with searched groups of 64."""

        def prepare() -> dict[str, Any]:
            samples = load_samples(self.checkpoint, str(self.options.calibration), 64, 512, premask=True, seed=0)
            calibrator = Calibrator(self.checkpoint, self.layout, samples, CalibrationSettings())
            blocks = [block.only(DENSE_ROLES) for block in self.layout.dense]
            for run in calibrator.layers({block.name: block for block in blocks if block.linears}):
                for stage in run:
                    run.answer(self._dense(stage, bits) if stage.dense else self._experts(stage, bits))
            return {"settings": {"bits": bits}, "bytes": self.plain(bits)["bytes"]}

        return self.measured(f"int{bits} gptq", prepare)

    def _solve(self, weights: Tensor, hessians: Tensor, bits: int) -> Tensor:
        grid = AffineGrid(bits, 64, search=True)
        return gptq(weights, hessians, grid, GptqSettings(damping=0.01)).values

    @torch.no_grad()
    def _experts(self, stage: Stage, bits: int) -> dict[str, Tensor]:
        hessians, module = stage.hessians(), self.model.get_submodule(stage.layer)
        found = {name: self._solve(weights, hessians, bits) for name, weights in stage.weights.items()}
        for name, values in found.items():
            target = module.down_proj if name == "down_proj" else module.gate_up_proj.chunk(2, 1)[name != "gate_proj"]
            target[stage.experts.start : stage.experts.stop].copy_(values)
        return found

    @torch.no_grad()
    def _dense(self, stage: Stage, bits: int) -> dict[str, Tensor]:
        hessians = stage.moments().hessians
        found = {path: self._solve(weights, hessians, bits) for path, weights in stage.weights.items()}
        for path, values in found.items():
            self.model.get_submodule(path).weight.copy_(values[0])
        return found

    def int3(self) -> Iterator[Job]:
        """The paper's table 3."""
        yield lambda: self.packed("int3 lsq", rank="uniform:0")
        yield from self.base(3)
        for name, rank in (("s1", "dense:512+kurtosis:16"), ("s2", "dense:1024+kurtosis:32")):
            yield lambda name=name, rank=rank: self.packed(f"int3 {name}", rank=rank)

    def int2(self) -> Iterator[Job]:
        """Table 3 with codes of two bits."""
        yield from self.base(2)

    def base(self, bits: int) -> Iterator[Job]:
        """The rows measured at every width."""
        yield lambda: self.packed(f"int{bits} hqq", bits=bits, solver="hqq", rank="uniform:0")
        yield lambda: self.budget(bits, 12)
        yield lambda: self.gptq(bits)
        yield lambda: self.budget(bits, 5)

    def policies(self) -> Iterator[Job]:
        """Named policies with as many ranks as 12% more bytes allow (the paper's table 4)."""
        limit = self.plain(3)["bytes"] * 1.12
        whole = self.size({"rank": "dense:4096"}) < limit
        dense = f"dense:{4096 if whole else self.fit('dense:', limit) // 2}+"
        text = self.text()
        for policy in ("uniform:", "dense:", "sparse:", f"{dense}sparse:", f"{dense}kurtosis:", f"{dense}frequency:"):
            more = text if "frequency" in policy else {}
            yield lambda policy=policy, more=more: self.packed(
                f"int3 policy {policy}", rank=f"{policy}{self.fit(policy, limit)}", **more
            )
        yield lambda: self.budget(3, 12, symmetric=False)

    def text(self) -> dict[str, Any]:
        """The text for policies that count expert choices."""
        return {"calibration": str(self.options.calibration), "samples": 32}

    def weights(self) -> Iterator[Job]:
        """The weight of dense layers in a budget, chosen on wikitext2-valid."""
        for weight in (1.0, 4.0, 2.0, 8.0, 16.0):
            yield lambda weight=weight: self.budget(3, 12, dense_weight=weight)
        for weight in (1.0, 4.0, 2.0, 8.0):
            yield lambda weight=weight: self.budget(3, 12, dense_weight=weight, **self.text())

    def fit(self, policy: str, limit: float) -> int:
        """The largest rank whose bytes are within the limit, or above which nothing changes."""
        low, high = 0, 4096
        policy = policy.replace("kurtosis", "sparse").replace("frequency", "sparse")
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.size({"rank": f"{policy}{middle}"}) <= limit else (low, middle)
        return low

    def size(self, settings: dict[str, Any]) -> int:
        """Bytes of all packed tensors."""
        method = Milo(**settings)
        method.prepare(self.checkpoint, self.layout)
        plan, total = method.plan, 0
        for source in find_sources(self.layout):
            total += packed_bytes(source.shape, plan.specs[source.name], sum(plan.ranks[source.name]), method.rank_bits)
        return total

    def factors(self) -> Iterator[Job]:
        """The ranks of table 6 with factors of other widths, refined inside the alternation or rounded at its end."""
        rank = "dense:64+sparse:8"
        for bits in (16, 8, 3):
            yield lambda bits=bits: self.packed(f"int3 factors {bits}", rank=rank, rank_bits=bits)
        yield lambda: self.packed("int3 factors 3 late", rank=rank, refine=False)
        yield lambda: self.packed("int3 factors 3 once", rank=rank, rounds=1)


def errors(records: Any) -> dict[str, float]:
    """Mean relative squared errors of dense tensors and of experts."""
    found: dict[str, list[float]] = {"dense": [], "experts": []}
    for record in records:
        found["experts" if record.experts else "dense"].append(record.details["relative_error"])
    return {f"{kind}_error": sum(values) / len(values) for kind, values in found.items() if values}


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    """For each model: bytes relative to plain rounding, and by text the loss increase with the recovered share of
    rounding's."""
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = {row["label"]: row for row in rows if row["model"] == model}
        texts = list(mine["original"]["loss"])
        yield f"\n{model}: original " + ", ".join(f"{text} {mine['original']['loss'][text]:.4f}" for text in texts)
        for label, row in mine.items():
            plain = mine.get(f"{label.split()[0]} rtn")
            if plain is None:
                continue
            parts = [f"| {label} | {100 * (row['bytes'] / plain['bytes'] - 1):+.1f}% |"]
            for text in texts:
                rise, gap = (r["loss"][text] - mine["original"]["loss"][text] for r in (row, plain))
                parts.append(f" {rise:.4f} | {100 * (1 - rise / gap):.0f}% |")
            yield "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--texts", nargs="+", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--chars", type=int, default=100_000)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--device", default="cpu", help="device for the evaluation; packing runs on the CPU")
    parser.add_argument("--jobs", type=int, nargs="*", help="indices of the configurations to measure; default: all")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tables", action="store_true")
    options = parser.parse_args()
    for path in options.models:
        bench = Bench(path, options)
        jobs = [job for part in options.only for job in getattr(bench, part)()]
        for number in range(len(jobs)) if options.jobs is None else options.jobs:
            jobs[number]()
    if options.tables:
        print("\n".join(tables(read_rows(options.rows))))
    if options.json:
        machine.save(options.json, torch.get_num_threads(), read_rows(options.rows))


if __name__ == "__main__":
    main()

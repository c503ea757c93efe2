"""Measures group-wise integers: bytes and loss for fixed, adaptive and budgeted group sizes, bits by role, and grids.

    python -m benches.quality.finequant MODEL... --evaluation TEXT --json F [--chars N] [--only PART ...]
        [--device cuda]
    python -m benches.quality.finequant --json F [--gaussian] [--merge OTHER.json] [--plot PNG]

`rule` explains the adaptive rules without running the model: the squared error of each allocation (as the budget counts
it) relative to fixed sizes at equal bytes.

Every point of the parts `quality`, `curve`, `outliers` and `roles` is a packed directory, evaluated like `moepack eval`
(windows of 512 tokens) against the original model: loss increase and KL divergence in nats per token, and bits per
packed weight, including all metadata. `quality` also multiplies in the mode int8. On a GPU the packed values are
measured in transformers' own model; packing always runs on the CPU. `grids` compares quantization grids, some of which
have no stored format (log-scale, truncation), by replacing the weights of the original model's experts.

Rows are written to the JSON file as they are measured and are not measured again: interrupted runs continue, and
models, texts and parts can be added one by one. The original's logits are kept: 2.2 GB for 250,000 characters and a
vocabulary of 8,192 tokens.
"""

import argparse
import itertools
import json
import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benches.tools import machine
from benches.tools.dequantized import Dequantized
from benches.tools.pictures import LOSS, logarithmic, panels, write
from moepack.checkpoint import Checkpoint, describe
from moepack.evaluation import evaluate
from moepack.format import PackedDirectory
from moepack.integrations.loading import load, open_model, open_tokenizer
from moepack.methods import MethodPlan
from moepack.methods.finequant import FineQuant
from moepack.methods.finequant.planning import Proposal, plan_sizes, proposals
from moepack.methods.finequant.sizes import free_size, halving_ratios, stored_size
from moepack.pipeline import compress
from moepack.solvers.groupwise import group_values, quantize_groupwise

FIXED = ("row", 256, 128, 64, 32, 16)
ALPHAS = (0.5, 0.45, 0.4, 0.35)
ROLES = ((8, None), (8, 8), (4, None), (4, 8), (4, 4), (4, 3), (3, 8), (3, 4), (3, 3))
"""Bits of the experts, and of attention, shared experts and dense layers."""
MODELS = "mixtral-25m qwen3moe-22m deepseek-v2-13m tiny-mixtral"
"""The order of the pictures' columns."""


class Original:
    """The original model with a cache of its outputs, because the same batches are evaluated repeatedly."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        self.model = open_model(path, torch.float32).to(device)
        self.config, self.device = self.model.config, self.model.device
        self.answers: dict[bytes, Any] = {}

    def __call__(self, **inputs: Any) -> Any:
        """Run the model, or return the cached output."""
        key = b"".join(value.cpu().numpy().tobytes() for value in inputs.values() if isinstance(value, torch.Tensor))
        if key not in self.answers:
            self.answers[key] = SimpleNamespace(logits=self.model(**inputs).logits)
        return self.answers[key]


class Results:
    """The rows of a JSON file, which is rewritten after every new row."""

    def __init__(self, file: Path, device: str) -> None:
        self.file, self.device = file, device
        about = machine.describe(torch.get_num_threads(), device)
        self.content: dict[str, Any] = {"machine": about, "rows": []}
        if file.exists():
            self.content = json.loads(file.read_text())
        self.rows: list[dict[str, Any]] = self.content["rows"]

    def find(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """The row with this key, if it was measured."""
        return next((row for row in self.rows if all(row.get(name) == value for name, value in key.items())), None)

    def merge(self, file: Path) -> None:
        """Add the rows of another run, with the accelerator that measured them."""
        content = json.loads(file.read_text())
        for row in content["rows"]:
            device = row.get("device") or content["machine"]["device"]
            if self.find({name: value for name, value in row.items() if name not in ("loss", "device")}) is None:
                self.add({**row, "device": device})

    def add(self, row: dict[str, Any]) -> None:
        """Store a row, also in the file."""
        print(json.dumps(row), flush=True)
        self.rows.append(row)
        self.content["date"] = time.strftime("%Y-%m-%d")
        rows = ",\n".join(f"  {json.dumps(row)}" for row in self.rows)
        about = json.dumps({name: value for name, value in self.content.items() if name != "rows"}, indent=1)
        self.file.write_text(f'{about[:-2]},\n "rows": [\n{rows}\n ]\n}}\n')


class Budgeted(FineQuant):
    """A budget that reuses measured tensors, because measuring takes longer than packing."""

    measured: list[Any]

    def plan(self, checkpoint: Checkpoint, model: Any, progress: Any = None) -> MethodPlan:
        """Allocate only."""
        sizes = plan_sizes(self.measured, self.bits_per_weight, self.symmetric)
        return MethodPlan(self, self._with_sizes(sizes), checkpoint.fingerprint(), self.settings, decisions=sizes)

    @classmethod
    def series(cls, source: Path, bits: int, rates: list[float]) -> Iterator[tuple[float, FineQuant]]:
        """Methods for several rates, with everything packed in the same bits."""
        if not rates:
            return
        checkpoint, roles = Checkpoint.open(source), dict.fromkeys(("experts", "attention", "shared", "mlp"), bits)
        found = list(proposals(checkpoint, describe(checkpoint), roles))
        for rate in rates:
            method = cls(bits, "budget", bits_per_weight=rate, dense_bits=bits, calibration=None)
            method.measured = found
            yield rate, method


class Bench:
    """One model and one text."""

    def __init__(self, model: Path, text: Path, chars: int, results: Results) -> None:
        self.model, self.text, self.chars, self.results = model, text, chars, results
        self.tokenizer, self.gpu = open_tokenizer(model), results.device != "cpu"
        self.original = Original(model, results.device)
        self.plain = Dequantized(model, results.device)

    def key(self, part: str, label: str, mode: str = "exact") -> dict[str, Any]:
        """The fields that identify a row."""
        about = {"model": self.model.name, "evaluation": self.text.name, "chars": self.chars}
        return {**about, "part": part, "label": label, "mode": mode}

    def packed(
        self, part: str, label: str, method: FineQuant, modes: tuple[str, ...] = ("exact",), source: Path | None = None
    ) -> dict[str, Any]:
        """Pack the model (or `source`) and evaluate it in every mode of the device; returns the first mode's row."""
        modes = modes[:1] if self.gpu else modes
        if missing := [mode for mode in modes if not self.results.find(self.key(part, label, mode))]:
            with tempfile.TemporaryDirectory() as directory:
                threads = torch.get_num_threads()
                path = compress(source or self.model, Path(directory) / "out", method=method, threads=threads).path
                records = PackedDirectory.open(path).manifest.packed().values()
                nbytes, weights = sum(r.nbytes for r in records), sum(math.prod(r.shape) for r in records)
                about = {"settings": dict(method.settings), "bytes": nbytes, "bits_per_weight": 8 * nbytes / weights}
                for mode in missing:
                    model = self.plain.packed(path) if self.gpu else load(path, torch.float32, mode=mode)
                    self.add(self.key(part, label, mode), model, about)
        found = self.results.find(self.key(part, label, modes[0]))
        assert found is not None
        return found

    def add(self, key: dict[str, Any], model: Any, about: dict[str, Any]) -> None:
        """Evaluate a model against the original and store the row."""
        report = evaluate(model, self.text, self.chars, self.original, tokenizer=self.tokenizer)
        assert report.reference_loss is not None
        figures = {"increase": report.loss - report.reference_loss, "kl": report.kl, "loss": report.loss}
        self.results.add({**key, **figures, **about})

    def quality(self) -> None:
        """Experts alone and everything packed, also with eight-bit activations."""
        for bits, size, dense in ((8, 64, None), (4, 64, None), (8, 64, 8), (4, 64, 8), (3, 64, None)):
            label = f"int{bits} group {size}" + (f", others int{dense}" if dense else ", experts only")
            self.packed("quality", label, FineQuant(bits, size, dense_bits=dense, calibration=None), ("exact", "int8"))

    def curve(self, bits: int) -> None:
        """Fixed sizes, the paper's rule, and budgets of the bytes of each fixed size and between them."""
        rates = []
        for size in FIXED:
            row = self.packed("curve", f"int{bits} {size}", FineQuant(bits, size, dense_bits=bits, calibration=None))
            rates.append(row["bits_per_weight"])
        for alpha in ALPHAS:
            method = FineQuant(bits, "adaptive", dense_bits=bits, alpha=alpha, calibration=None)
            self.packed("curve", f"int{bits} adaptive {alpha}", method)
        middles = [(a + b) / 2 for a, b in itertools.pairwise(rates) if b - a > 0.05]
        wanted = sorted({rate for rate in (*rates, *middles) if rate > rates[0]})
        missing = [rate for rate in wanted if not self.results.find(self.key("curve", f"int{bits} budget {rate:.4f}"))]
        for rate, method in Budgeted.series(self.model, bits, missing):
            self.packed("curve", f"int{bits} budget {rate:.4f}", method)

    def outliers(self) -> None:
        """A model of the same function with outliers in one layer (section 3.3 of the paper)."""
        with tempfile.TemporaryDirectory() as directory:
            source = Path(directory) / "model"
            add_outliers(self.model, source)
            rates = []
            for size in FIXED:
                method = FineQuant(4, size, dense_bits=4, calibration=None)
                rates.append(self.packed("outliers", f"int4 {size}", method, source=source)["bits_per_weight"])
            for alpha in (0.4, 0.35, 0.3):
                method = FineQuant(4, "adaptive", dense_bits=4, alpha=alpha, calibration=None)
                self.packed("outliers", f"int4 adaptive {alpha}", method, source=source)
            labels = {rate: f"int4 budget {rate:.4f}" for rate in sorted({rate for rate in rates if rate > rates[0]})}
            wanted = [rate for rate, label in labels.items() if not self.results.find(self.key("outliers", label))]
            for rate, method in Budgeted.series(source, 4, wanted):
                self.packed("outliers", f"int4 budget {rate:.4f}", method, source=source)

    def roles(self) -> None:
        """Bits by role, in groups of 64 (table 5 of the paper)."""
        for bits, dense in ROLES:
            label = f"experts int{bits}, others {'as they are' if dense is None else f'int{dense}'}"
            self.packed("roles", label, FineQuant(bits, 64, dense_bits=dense, calibration=None))

    def rule(self) -> None:
        """Sizes and errors of the adaptive rule and of the budget at four bits."""
        about = {"model": self.model.name, "part": "rule"}
        if self.results.find({**about, "label": f"adaptive {ALPHAS[-1]}"}) is not None:
            return
        checkpoint = Checkpoint.open(self.model)
        described = describe(checkpoint)
        found = list(proposals(checkpoint, described, dict.fromkeys(("experts", "attention", "shared", "mlp"), 4)))
        weights = sum(math.prod(tensor.shape) for tensor in found)
        fixed = [_sums(found, [size] * len(found)) for size in (None, *FIXED[1:])]
        ratios = _ratios(described)
        for alpha in ALPHAS:
            picked = [free_size(t.shape, stored_size(t.shape[2], ratios[t.name], alpha)) for t in found]
            nbytes, error = _sums(found, picked)
            budget = list(plan_sizes(found, 8 * nbytes / weights).values())
            reference = float(np.interp(nbytes, [b for b, _ in fixed], [e for _, e in fixed]))
            sizes = Counter(str(size or "row") for size in picked)
            self.results.add({
                **about, "label": f"adaptive {alpha}", "bits_per_weight": 8 * nbytes / weights, "sizes": dict(sizes),
                "error_over_fixed": error / reference, "budget_over_fixed": _sums(found, budget)[1] / reference,
            })  # fmt: skip

    def grids(self) -> None:
        """The paper's comparison of grids (figure 1) with additional grids, for one scale per row and for groups of
        64; experts only. Bits per weight count 16 bits for a scale and for an offset, without padding."""
        for bits, size, name in itertools.product((4, 3, 2), (None, 64), GRIDS):
            key = self.key("grids", f"int{bits} {size or 'row'} {name}")
            if self.results.find(key) is None:
                model, parameters, weights = self.plain.original(), 0.0, 0
                for values in expert_matrices(self.model, model):
                    values.copy_(GRIDS[name](values.flatten(0, 1), bits, size).view(values.shape))
                    weights += values.numel()
                    parameters += values.numel() / (size or values.shape[-1]) * (2 if "offset" in name else 1)
                self.add(key, model, {"bits": bits, "bits_per_weight": bits + 16 * parameters / weights})


def _sums(proposed: list[Proposal], picked: list[int | None]) -> tuple[int, float]:
    """Bytes and errors of an allocation; a size that exceeds a row means the whole row."""
    taken = []
    for one, size in zip(proposed, picked, strict=True):
        taken.append(next((c for c in one.candidates if c.specification == size), one.candidates[0]))
    return sum(one.nbytes for one in taken), sum(one.loss for one in taken)


def _ratios(model: Any) -> dict[str, Any]:
    """The inputs of the rule by tensor: the ratios of ranges at each halving."""
    found = {}
    for layer in model.layers:
        for projection in layer.projections:
            each = np.stack([halving_ratios(projection.expert(e)) for e in range(projection.shape[0])])
            found[projection.packed_name] = each.min(0)
    for layer in model.dense:
        found |= {linear.source: halving_ratios(linear.matrix()) for linear in layer.linears}
    return found


def uniform(weight: torch.Tensor, bits: int, size: int | None, symmetric: bool, search: bool) -> torch.Tensor:
    """A grid of the format, [R, C] to [R, C]."""
    found = quantize_groupwise(weight, bits, size, symmetric=symmetric, search=search)
    return group_values(found, bits, size)


def truncated(weight: torch.Tensor, bits: int, size: int | None) -> torch.Tensor:
    """Appendix A as printed: `int(A / s)` with s = 2 amax / (2^b - 1); `size` divides the columns."""
    groups = weight.reshape(len(weight), -1, size or weight.shape[1])
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) * (2 / (2**bits - 1))
    return ((groups / scale).trunc() * scale).reshape(weight.shape)


GRIDS: dict[str, Callable[[torch.Tensor, int, int | None], torch.Tensor]] = {
    "uniform, truncated as printed": truncated,
    "uniform, rounded": partial(uniform, symmetric=True, search=False),
    "uniform, searched scale": partial(uniform, symmetric=True, search=True),
    "uniform with offset, rounded": partial(uniform, symmetric=False, search=False),
    "uniform with offset, searched": partial(uniform, symmetric=False, search=True),
}


def add_outliers(model: Path, out: Path, factor: float = 32.0) -> None:
    """Copy a model; in its middle sparse layer, every expert's first inner channel gets a down column `factor` times as
    large and an up row as much smaller: the same function, exactly in bfloat16."""
    shutil.copytree(model, out)
    out.chmod(0o755)
    (out / "model.safetensors").chmod(0o644)
    tensors = load_file(out / "model.safetensors")
    layers = describe(Checkpoint.open(model)).layers
    projections = {projection.name: projection for projection in layers[len(layers) // 2].projections}
    for part in projections["up_proj"].parts:
        tensors[part.tensor][0] /= factor
    for part in projections["down_proj"].parts:
        tensors[part.tensor][:, 0] *= factor
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def expert_matrices(path: Path, model: Any) -> Iterator[torch.Tensor]:
    """The experts' weights in a loaded model as views [E, R, C], gate and up separately."""
    with torch.no_grad():
        for layer in describe(Checkpoint.open(path)).layers:
            experts = model.get_submodule(layer.name)
            yield from experts.gate_up_proj.chunk(2, dim=1)
            yield experts.down_proj


def gaussian(results: Results) -> None:
    """Squared error of Gaussian weights relative to their energy, in groups of 64."""
    weight = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))
    for bits, symmetric, search in itertools.product((8, 4, 3, 2), (True, False), (False, True)):
        found = quantize_groupwise(weight, bits, 64, symmetric=symmetric, search=search)
        about = {"part": "gaussian", "bits": bits, "symmetric": symmetric, "search": search}
        error = (group_values(found, bits, 64) - weight).square().sum() / weight.square().sum()
        results.add({**about, "relative_error": float(error)})
    for bits in (8, 4, 3, 2):
        error = (truncated(weight, bits, 64) - weight).square().sum() / weight.square().sum()
        results.add({"part": "gaussian", "bits": bits, "truncated": True, "relative_error": float(error)})


LINES = {
    "fixed": ("o-", "one group size (whole rows, 256, 128, 64, 32, 16)"),
    "adaptive": ("x", "adaptive: minimum ratio below alpha"),
    "adaptive-mean": ("+", "adaptive-mean: mean ratio below alpha"),
    "budget": (".--", "budget"),
}
"""Style and legend by kind of group size."""


def plot(rows: list[dict[str, Any]], file: Path, figure_of: str) -> None:
    """Draw `kl` or `increase` over bits per weight: a row of panels for each number of bits, then the outliers."""
    drawn = [row for row in rows if row["part"] in ("curve", "outliers")]
    found = dict.fromkeys((row["part"], row["model"], row["settings"]["bits"]) for row in drawn)
    chosen_panels = sorted(found, key=lambda panel: (panel[0], -panel[2], MODELS.find(panel[1])))
    figure, axes = panels(len(chosen_panels))
    for axis, (part, model, bits) in zip(axes, chosen_panels, strict=True):
        chosen = [r for r in drawn if (r["part"], r["model"], r["settings"]["bits"]) == (part, model, bits)]
        longest = max(row["chars"] for row in chosen)
        chosen = [row for row in chosen if row["chars"] == longest]
        for kind, (style, label) in LINES.items():
            points = sorted((row["bits_per_weight"], row[figure_of]) for row in chosen if kind_of(row) == kind)
            axis.plot([x for x, _ in points], [y for _, y in points], style, label=label)
        title = f"{model}, {bits} bits" + (", one layer with outliers" if part == "outliers" else "")
        axis.set(title=title, xlabel="bits per weight, all packed tensors")
        if figure_of == "kl":
            logarithmic(axis)
    write(figure, axes, "KL(original || packed)" if figure_of == "kl" else LOSS, file)


def kind_of(row: dict[str, Any]) -> str:
    size = row["settings"]["group_size"]
    return size if size in ("adaptive", "adaptive-mean", "budget") else "fixed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--evaluation", type=Path)
    parser.add_argument("--chars", type=int, default=250_000)
    parser.add_argument("--bits", nargs="*", type=int, default=[4, 3], help="bits of the curve")
    parts = ["quality", "curve", "outliers", "roles", "grids", "rule"]
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cpu", help="device for the evaluation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--merge", nargs="*", type=Path, default=[], help="results of other runs to add")
    parser.add_argument("--gaussian", action="store_true", help="measure errors of Gaussian weights")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--figure", choices=["kl", "increase"], default="kl", help="quantity in the picture")
    options = parser.parse_args()
    if options.models and not options.evaluation:
        parser.error("--evaluation names the text")
    torch.set_num_threads(options.threads)
    results = Results(options.json, options.device)
    for file in options.merge:
        results.merge(file)
    for model in options.models:
        bench = Bench(model, options.evaluation, options.chars, results)
        for part in options.only:
            for bits in options.bits if part == "curve" else [None]:
                getattr(bench, part)(*([] if bits is None else [bits]))
    if options.gaussian:
        gaussian(results)
    if options.plot:
        plot(results.rows, options.plot, options.figure)


if __name__ == "__main__":
    main()

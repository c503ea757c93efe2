"""Integers in groups: bytes against loss, for fixed, adaptive and budgeted group sizes, bits by role, and grids.

    python benches/finequant.py MODEL [MODEL ...] --evaluation TEXT --json F [--chars N] [--only PART ...]
    python benches/finequant.py --json F [--gaussian] [--plot PNG]

Every point of the parts `quality`, `curve`, `outliers` and `roles` is a packed directory made by the product and
evaluated as `moepack eval` does (windows of 512 tokens), against the original model: loss increase and KL divergence in
nats a token, bits a weight over everything that was packed, all metadata counted. `quality` also multiplies in the mode
int8.
`grids` compares quantization grids that have no stored format (log-scale, truncation) by replacing the weights of the
original model's experts.

Rows go to the JSON file as they are measured, and what it holds already is not measured again: a run that was cut off
continues, and models, texts and parts can be added one by one. The logits of the original are kept: 2.2 GB for 250,000
characters and 8,192 tokens of vocabulary.
"""

import argparse
import itertools
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import machine
from moepack.checkpoint import Checkpoint, describe
from moepack.evaluation import evaluate
from moepack.format import PackedDirectory
from moepack.methods.finequant import FineQuant
from moepack.pipeline import compress
from moepack.runtime.loading import load, open_model, open_tokenizer
from moepack.solvers.groupwise import group_values, quantize_groupwise
from moepack.solvers.logarithmic import round_logarithmic

FIXED = ("row", 256, 128, 64, 32, 16)
ALPHAS = (0.6, 0.5, 0.45, 0.4, 0.35)
ROLES = ((8, None), (8, 8), (4, None), (4, 8), (4, 4), (4, 3), (3, 8), (3, 4), (3, 3))
"""Bits of the experts, and of attention, shared experts and dense layers."""


class Original:
    """The original model, which is asked the same batches again and again; it remembers its answers."""

    def __init__(self, path: Path) -> None:
        self.model = open_model(path, torch.float32)
        self.config, self.device = self.model.config, self.model.device
        self.answers: dict[bytes, Any] = {}

    def __call__(self, **inputs: Any) -> Any:
        """Run the model, or give the answer of before."""
        key = b"".join(value.numpy().tobytes() for value in inputs.values() if isinstance(value, torch.Tensor))
        if key not in self.answers:
            self.answers[key] = SimpleNamespace(logits=self.model(**inputs).logits)
        return self.answers[key]


class Results:
    """The rows of a JSON file, which is rewritten with every new one."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.content: dict[str, Any] = {"machine": machine.describe(torch.get_num_threads()), "rows": []}
        if file.exists():
            self.content = json.loads(file.read_text())
        self.rows: list[dict[str, Any]] = self.content["rows"]

    def find(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """The row of that key, if it was measured."""
        return next((row for row in self.rows if all(row.get(name) == value for name, value in key.items())), None)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, in the file too."""
        print(json.dumps(row), flush=True)
        self.rows.append(row)
        self.content["date"] = time.strftime("%Y-%m-%d")
        rows = ",\n".join(f"  {json.dumps(row)}" for row in self.rows)
        about = json.dumps({name: value for name, value in self.content.items() if name != "rows"}, indent=1)
        self.file.write_text(f'{about[:-2]},\n "rows": [\n{rows}\n ]\n}}\n')


class Bench:
    """One model and one text."""

    def __init__(self, model: Path, text: Path, chars: int, results: Results) -> None:
        self.model, self.text, self.chars, self.results = model, text, chars, results
        self.tokenizer = open_tokenizer(model)
        self.original = Original(model)

    def key(self, part: str, label: str, mode: str = "exact") -> dict[str, Any]:
        """What tells a row from the others."""
        about = {"model": self.model.name, "evaluation": self.text.name, "chars": self.chars}
        return {**about, "part": part, "label": label, "mode": mode}

    def packed(
        self, part: str, label: str, method: FineQuant, modes: tuple[str, ...] = ("exact",), source: Path | None = None
    ) -> dict[str, Any]:
        """Pack the model (or `source`), evaluate in every mode; gives the first mode's row."""
        if missing := [mode for mode in modes if not self.results.find(self.key(part, label, mode))]:
            with tempfile.TemporaryDirectory() as directory:
                path = compress(source or self.model, Path(directory) / "out", method=method).path
                records = PackedDirectory.open(path).manifest.packed().values()
                nbytes, weights = sum(r.nbytes for r in records), sum(math.prod(r.shape) for r in records)
                about = {"settings": dict(method.settings), "bytes": nbytes, "bits_per_weight": 8 * nbytes / weights}
                for mode in missing:
                    self.add(self.key(part, label, mode), load(path, torch.float32, mode=mode), about)
        found = self.results.find(self.key(part, label, modes[0]))
        assert found is not None
        return found

    def add(self, key: dict[str, Any], model: Any, about: dict[str, Any]) -> None:
        """Evaluate a model against the original and keep the row."""
        report = evaluate(model, self.text, self.chars, self.original, tokenizer=self.tokenizer)
        assert report.reference_loss is not None
        figures = {"increase": report.loss - report.reference_loss, "kl": report.kl, "loss": report.loss}
        self.results.add({**key, **figures, **about})

    def quality(self) -> None:
        """What a user gets: experts alone and everything packed, and what activations of eight bits cost."""
        for bits, size, dense in ((8, 64, None), (4, 64, None), (8, 64, 8), (4, 64, 8), (3, 64, None)):
            label = f"int{bits} group {size}" + (f", others int{dense}" if dense else ", experts only")
            self.packed("quality", label, FineQuant(bits, size, dense_bits=dense), ("exact", "int8"))

    def curve(self, bits: int) -> None:
        """Fixed sizes; the paper's rule; budgets of the bytes of each fixed size and between them."""
        rates = []
        for size in FIXED:
            row = self.packed("curve", f"int{bits} {size}", FineQuant(bits, size, dense_bits=bits))
            rates.append(row["bits_per_weight"])
        for alpha in ALPHAS:
            method = FineQuant(bits, "adaptive", dense_bits=bits, alpha=alpha)
            self.packed("curve", f"int{bits} adaptive {alpha}", method)
        middles = [(a + b) / 2 for a, b in itertools.pairwise(rates) if b - a > 0.05]
        for rate in sorted({rate for rate in (*rates, *middles) if rate > rates[0]}):
            method = FineQuant(bits, "budget", bits_per_weight=rate, dense_bits=bits)
            self.packed("curve", f"int{bits} budget {rate:.4f}", method)

    def outliers(self) -> None:
        """A model whose function is the same, one of whose layers has outliers (section 3.3 of the paper)."""
        with tempfile.TemporaryDirectory() as directory:
            source = Path(directory) / "model"
            add_outliers(self.model, source)
            rates = []
            for size in FIXED:
                method = FineQuant(4, size, dense_bits=4)
                rates.append(self.packed("outliers", f"int4 {size}", method, source=source)["bits_per_weight"])
            for alpha in (0.4, 0.35, 0.3, 0.25):
                method = FineQuant(4, "adaptive", dense_bits=4, alpha=alpha)
                self.packed("outliers", f"int4 adaptive {alpha}", method, source=source)
            for rate in sorted({rate for rate in rates if rate > rates[0]}):
                method = FineQuant(4, "budget", bits_per_weight=rate, dense_bits=4)
                self.packed("outliers", f"int4 budget {rate:.4f}", method, source=source)

    def roles(self) -> None:
        """Bits by role, in groups of 64 (table 5 of the paper)."""
        for bits, dense in ROLES:
            label = f"experts int{bits}, others {'as they are' if dense is None else f'int{dense}'}"
            self.packed("roles", label, FineQuant(bits, 64, dense_bits=dense))

    def grids(self) -> None:
        """The paper's comparison of grids (figure 1), one scale a row, experts only."""
        grids: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
            "uniform, truncated (as printed)": truncated,
            "uniform, rounded": lambda w, bits: rounded(w, bits, search=False),
            "uniform, searched scale": lambda w, bits: rounded(w, bits, search=True),
            "log-scale, searched scale": round_logarithmic,
        }
        for bits, name in itertools.product((4, 3, 2), grids):
            key = self.key("grids", f"int{bits} {name}")
            if self.results.find(key) is None:
                model = open_model(self.model, torch.float32)
                for weights in expert_matrices(self.model, model):
                    weights.copy_(grids[name](weights, bits))
                self.add(key, model, {"bits": bits})


def rounded(weight: torch.Tensor, bits: int, search: bool) -> torch.Tensor:
    return group_values(quantize_groupwise(weight, bits, None, search=search), bits, None)


def truncated(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Appendix A as it is printed: `int(A / s)` with s = 2 amax / (2^b - 1)."""
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-30) * (2 / (2**bits - 1))
    return (weight / scale).trunc() * scale


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
    """The experts' weights in a loaded model, [E, R, C] each, to be overwritten; gate and up apart."""
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
    groups = weight.reshape(-1, 64)
    for bits in (8, 4, 3, 2):
        error = (truncated(groups, bits) - groups).square().sum() / groups.square().sum()
        results.add({"part": "gaussian", "bits": bits, "truncated": True, "relative_error": float(error)})


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [row for row in rows if row["part"] in ("curve", "outliers")]
    found = dict.fromkeys((row["part"], row["model"], row["settings"]["bits"]) for row in drawn)
    panels = sorted(found, key=lambda panel: (panel[0], -panel[2]))
    wide = min(len(panels), 4)
    figure, axes = pyplot.subplots(-(-len(panels) // wide), wide, squeeze=False, layout="constrained")
    figure.set_size_inches(4.4 * wide, 3.4 * len(axes))
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (part, model, bits) in zip(axes.flat, panels, strict=False):
        chosen = [r for r in drawn if (r["part"], r["model"], r["settings"]["bits"]) == (part, model, bits)]
        for kind, style in (("fixed", "o-"), ("adaptive", "x"), ("budget", ".--")):
            points = sorted((row["bits_per_weight"], row["kl"]) for row in chosen if kind_of(row) == kind)
            axis.plot([x for x, _ in points], [y for _, y in points], style, label=kind)
        title = f"{model}, {bits} bits" + (", one layer with outliers" if part == "outliers" else "")
        axis.set(title=title, xlabel="bits a weight, all packed tensors", ylabel="KL from the original (nats a token)")
        axis.set_yscale("log")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3, which="both")
    figure.savefig(file, dpi=100)


def kind_of(row: dict[str, Any]) -> str:
    size = row["settings"]["group_size"]
    return size if size in ("adaptive", "budget") else "fixed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--evaluation", type=Path)
    parser.add_argument("--chars", type=int, default=250_000)
    parser.add_argument("--bits", nargs="*", type=int, default=[4, 3], help="of the curve")
    parts = ["quality", "curve", "outliers", "roles", "grids"]
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--gaussian", action="store_true", help="errors of Gaussian weights")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.models and not options.evaluation:
        parser.error("--evaluation names the text")
    results = Results(options.json)
    for model in options.models:
        bench = Bench(model, options.evaluation, options.chars, results)
        for part in options.only:
            for bits in options.bits if part == "curve" else [None]:
                getattr(bench, part)(*([] if bits is None else [bits]))
    if options.gaussian:
        gaussian(results)
    if options.plot:
        plot(results.rows, options.plot)


if __name__ == "__main__":
    main()

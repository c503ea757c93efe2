"""Integers in groups: bytes against loss, for fixed, adaptive and budgeted group sizes, bits by role, and grids.

    python benches/finequant.py MODEL [MODEL ...] --evaluation TEXT [--chars N] [--only PART ...] [--json F] [--plot F]

Every point of the parts `quality`, `curve` and `roles` is a packed directory made by the product and evaluated as
`moepack eval` does (windows of 512 tokens), against the original model: loss increase and KL divergence in nats a
token, bits a weight over everything that was packed, all metadata counted. `quality` also multiplies in the mode int8.
`grids` compares quantization grids that have no stored format (log-scale, truncation) by replacing the weights of the
original model's experts. The logits of the original are kept: 10 GB for a million characters and 8,192 tokens of
vocabulary. The JSON names the machine.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import machine
from moepack.checkpoint import Checkpoint, describe
from moepack.evaluation import evaluate
from moepack.format import PackedDirectory
from moepack.methods.finequant import FineQuant
from moepack.pipeline import compress
from moepack.runtime.loading import load, open_model, open_tokenizer
from moepack.solvers.groupwise import group_values, quantize_groupwise

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


class Bench:
    """One model and one text; rows gather in `rows`."""

    def __init__(self, model: Path, text: Path, chars: int) -> None:
        self.model, self.text, self.chars = model, text, chars
        self.tokenizer = open_tokenizer(model)
        self.original = Original(model)
        self.rows: list[dict[str, Any]] = []

    def packed(self, part: str, label: str, method: FineQuant, modes: tuple[str, ...] = ("exact",)) -> dict[str, Any]:
        """Pack, evaluate in every mode; gives the last row."""
        with tempfile.TemporaryDirectory() as directory:
            path = compress(self.model, Path(directory) / "out", method=method).path
            records = PackedDirectory.open(path).manifest.packed().values()
            nbytes, weights = sum(r.nbytes for r in records), sum(math.prod(r.shape) for r in records)
            about = {"settings": dict(method.settings), "bytes": nbytes, "bits_per_weight": 8 * nbytes / weights}
            for mode in modes:
                loaded = load(path, torch.float32, mode=mode)
                self.add(part, label, loaded, {**about, "mode": mode})
        return self.rows[-1]

    def add(self, part: str, label: str, model: Any, about: dict[str, Any]) -> None:
        """Evaluate a model against the original and keep the row."""
        report = evaluate(model, self.text, self.chars, self.original, tokenizer=self.tokenizer)
        assert report.reference_loss is not None
        figures = {"increase": report.loss - report.reference_loss, "kl": report.kl, "loss": report.loss}
        self.rows.append({"model": self.model.name, "part": part, "label": label, **figures, **about})
        print(json.dumps(self.rows[-1]), flush=True)

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
        middles = [(a + b) / 2 for a, b in pairwise(rates) if b - a > 0.05]
        for rate in sorted({*rates[1:], *middles}):
            method = FineQuant(bits, "budget", bits_per_weight=rate, dense_bits=bits)
            self.packed("curve", f"int{bits} budget", method)

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
            "log-scale, searched scale": logarithmic,
        }
        for bits in (4, 3, 2):
            for name, grid in grids.items():
                model = open_model(self.model, torch.float32)
                for weights in expert_matrices(self.model, model):
                    weights.copy_(grid(weights, bits))
                self.add("grids", f"int{bits} {name}", model, {"bits": bits})


def rounded(weight: torch.Tensor, bits: int, search: bool) -> torch.Tensor:
    return group_values(quantize_groupwise(weight, bits, None, search=search), bits, None)


def truncated(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Appendix A as it is printed: `int(A / s)` with s = 2 amax / (2^b - 1)."""
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-30) * (2 / (2**bits - 1))
    return (weight / scale).trunc() * scale


def logarithmic(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Appendix A: a sign and b - 1 bits of exponent; the scale of each row is searched (its second way)."""
    least = 2.0 ** (1 - 2 ** (bits - 1))
    amax = weight.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    best, error = torch.zeros_like(weight), torch.full_like(amax, torch.inf)
    for step in torch.linspace(0.2, 1.4, 49).tolist():
        scale = amax * step
        exponent = torch.log2((weight.abs() / scale).clamp(least, 1) * (2 / 3)).ceil()
        values = weight.sign() * scale * torch.exp2(exponent)
        found = (values - weight).square().sum(-1, keepdim=True)
        best, error = torch.where(found < error, values, best), torch.minimum(found, error)
    return best


def expert_matrices(path: Path, model: Any) -> Iterator[torch.Tensor]:
    """The experts' weights in a loaded model, [E, R, C] each, to be overwritten; gate and up apart."""
    with torch.no_grad():
        for layer in describe(Checkpoint.open(path)).layers:
            experts = model.get_submodule(layer.name)
            yield from experts.gate_up_proj.chunk(2, dim=1)
            yield experts.down_proj


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot.subplots(1, len(models), figsize=(5.5 * len(models), 4.2), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        chosen = [row for row in rows if row["model"] == model and row["part"] == "curve"]
        for bits in sorted({row["settings"]["bits"] for row in chosen}):
            for kind, style in (("fixed", "o-"), ("adaptive", "x"), ("budget", ".--")):
                points = [
                    (row["bits_per_weight"], row["kl"])
                    for row in chosen
                    if row["settings"]["bits"] == bits and kind_of(row) == kind
                ]
                axis.plot(*zip(*sorted(points), strict=True), style, label=f"int{bits} {kind}")
        axis.set(title=model, xlabel="bits a weight, everything packed", ylabel="KL from the original, nats a token")
        axis.set_yscale("log")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def kind_of(row: dict[str, Any]) -> str:
    size = row["settings"]["group_size"]
    return size if size in ("adaptive", "budget") else "fixed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--evaluation", type=Path, required=True)
    parser.add_argument("--chars", type=int, default=250_000)
    parser.add_argument("--bits", nargs="*", type=int, default=[4, 3], help="of the curve")
    parts = ["quality", "curve", "roles", "grids"]
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    about = {"machine": machine.describe(torch.get_num_threads()), "date": time.strftime("%Y-%m-%d")}
    about |= {"evaluation": options.evaluation.name, "chars": options.chars}
    print(json.dumps(about), flush=True)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        bench = Bench(model, options.evaluation, options.chars)
        for part in options.only:
            for bits in options.bits if part == "curve" else [None]:
                getattr(bench, part)(*([] if bits is None else [bits]))
        rows += bench.rows
        if options.json:
            options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    if options.plot and "curve" in options.only:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()

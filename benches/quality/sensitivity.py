"""Measures how weight errors affect the loss of a pretrained model, and the best integer steps that follow.

    python -m benches.quality.sensitivity samples MODEL --results FILE [--device cuda]
    python -m benches.quality.sensitivity texts MODEL --texts FILE ... --sources FILE ... [--bits 3 4] [--steps 40]
        [--device cuda]
    python -m benches.quality.sensitivity steps MODEL --texts FILE ... --sources FILE [--bits 3 4] [--device cuda]

`samples` generates a text with MODEL, from random first tokens at temperature 1.

`texts` compresses MODEL by `auto` with each source, which may be `none` or `built-in`. Prints the loss that the plan
expected, and the measured loss increase and divergence. With --steps, `moepack tune` follows on the same source, and a
second row shows its result.

`steps` rounds all weights to integers whose steps follow the squared gradients F of the source's text: per tensor (the
mean of F), or proportional to 1 / sqrt(rows^b columns^a) within it, with the means of F over columns and over rows. The
size is the entropy of each tensor's integers, without scales (16 bits per row and column). There is no error
compensation, and there are no dependent codes: this measures the effect of the steps alone.

MODEL is a Mixtral checkpoint, such as from `benches/tools/real.py`; three float32 copies must fit on the device.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import moepack
from benches.tools.scores import SCORED, WINDOW, Scores, windows
from moepack.checkpoint import describe
from moepack.checkpoint.quantized import open_checkpoint
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.methods import Auto
from moepack.pipeline.tune import tune
from moepack.tuning import TuneSettings

SAMPLES = 64
"""Texts of a window that a model writes."""
LENGTH, WINDOWS = 256, 96
"""Tokens of a window whose gradients are taken, and how many."""
LEAST = 0.01
"""What the mean of F over a row or column counts at least, of the mean over the tensor."""
UNSEEN = 0.5
"""What is added to each row of the embedding, as `auto` does: other texts have other tokens."""
SHAPES = ((0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (0.0, 0.5), (0.0, 1.0), (0.5, 0.5), (1.0, 1.0))
"""Exponents a of columns and b of rows."""
LARGEST = 3000


def texts(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each size and source of `auto`."""
    scores = Scores(options.model, options.texts, options.device, options.windows)
    for bits in options.bits:
        for source in options.sources:
            method = Auto(bits_per_weight=bits, calibration=str(source), device=options.device)
            checkpoint = open_checkpoint(options.model)
            row = {"bits": bits, "source": source.stem}
            with tempfile.TemporaryDirectory() as folder:
                packed, tuned, start = Path(folder) / "packed", Path(folder) / "tuned", time.perf_counter()
                plan = method.plan(checkpoint, describe(checkpoint))
                moepack.compress(options.model, packed, method=plan, check=False)
                seconds = time.perf_counter() - start
                found = scores.of(loaded(packed, options.device))
                yield {**row, "expected": plan.packer.loss, "seconds": round(seconds), **found}
                if not options.steps:
                    continue
                start, settings = time.perf_counter(), TuneSettings(steps=options.steps, batch=options.batch)
                text, samples = str(options.tuning or source), options.tune_samples
                tune(
                    packed,
                    options.model,
                    tuned,
                    calibration=text,
                    samples=samples,
                    settings=settings,
                    device=options.device,
                )
                seconds = time.perf_counter() - start
                found = scores.of(loaded(tuned, options.device))
                yield {**row, "steps": options.steps, "batch": options.batch, "seconds": round(seconds), **found}


def loaded(packed: Path, device: str) -> Any:
    """A packed model in float32."""
    return moepack.load(packed, dtype="float32", **({} if device == "cpu" else {"device": device}))


def samples(options: argparse.Namespace) -> str:
    """A text that a model writes."""
    tokenizer = open_tokenizer(options.model)
    model = open_model(options.model, torch.bfloat16).to(options.device).eval()
    torch.manual_seed(0)
    ids = torch.randint(3, len(tokenizer), (SAMPLES, 1), device=options.device)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": WINDOW, "min_new_tokens": WINDOW, "pad_token_id": 0}
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return "\n\n".join(tokenizer.decode(each, skip_special_tokens=True) for each in written)


class Steps:
    """The weights of a model and their squared gradients, in parts that have a table of integers each."""

    def __init__(self, path: Path, source: Path, device: str) -> None:
        self.model = open_model(path, torch.float32).to(device).eval()
        ids = windows(open_tokenizer(path), source, 1 << 30, LENGTH)
        chosen = ids[torch.linspace(0, len(ids) - 1, min(WINDOWS, len(ids))).long()].to(device)
        parameters = {name: each for name, each in self.model.named_parameters() if _is_packed(name, each)}
        self.squares = _squares(self.model, parameters, chosen)
        self.weights = {name: each.detach().clone() for name, each in parameters.items()}
        self.count = sum(each.numel() for each in self.weights.values())
        self.parts: list[tuple[str, slice]] = []
        for name, each in self.weights.items():
            half = each.shape[-2] // 2
            halves = (slice(0, half), slice(half, None)) if name.endswith("gate_up_proj") else (slice(None),)
            self.parts += [(name, rows) for rows in halves]

    def scales(self, a: float, b: float) -> list[Tensor]:
        """What the weights of each part are multiplied by before they are rounded to one step."""
        found = []
        for name, rows in self.parts:
            squares = self.squares[name][..., rows, :]
            mean = squares.mean()
            by_row, by_column = (squares.mean(axis, keepdim=True) / mean for axis in (-1, -2))
            by_row = (by_row + UNSEEN) / (1 + UNSEEN) if "embed" in name else by_row.clamp(min=LEAST) ** b
            found.append((mean * by_row * by_column.clamp(min=LEAST) ** a).sqrt())
        return found

    def bits(self, scales: list[Tensor], step: float) -> float:
        """The entropy of the integers, bits a weight."""
        total = 0.0
        for (name, rows), scale in zip(self.parts, scales, strict=True):
            codes = (self.weights[name][..., rows, :] * scale / step).round().clamp(-LARGEST, LARGEST)
            counts = torch.bincount((codes.flatten() + LARGEST).int()).double()
            counts = counts[counts > 0]
            total -= float((counts * (counts / counts.sum()).log2()).sum())
        return total / self.count

    def rounded(self, scales: list[Tensor], bits: float) -> float:
        """Put rounded weights of a size into the model; the increase of the loss, were it a parabola."""
        narrow, wide = 1e-7, 10.0
        for _ in range(26):
            step = (narrow * wide) ** 0.5
            narrow, wide = (step, wide) if self.bits(scales, step) > bits else (narrow, step)
        rise = 0.0
        for (name, rows), scale in zip(self.parts, scales, strict=True):
            weights = self.weights[name][..., rows, :]
            values = (weights * scale / wide).round() * wide / scale
            rise += 0.5 * float(((values - weights).square() * self.squares[name][..., rows, :]).sum())
            self.model.get_parameter(name).data[..., rows, :] = values
        return rise


def _is_packed(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and not name.endswith("gate.weight")


def _squares(model: Any, parameters: dict[str, Any], chosen: Tensor) -> dict[str, Tensor]:
    """Means over tokens of the squared gradients of log p(y), y drawn from the model's own predictions."""
    torch.manual_seed(0)
    sums = {name: torch.zeros_like(each) for name, each in parameters.items()}
    for each in model.parameters():
        each.requires_grad_(False)
    for each in parameters.values():
        each.requires_grad_(True)
    for window in chosen:
        logits = model(window[None], use_cache=False).logits[0]
        drawn = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
        functional.cross_entropy(logits, drawn, reduction="sum").backward()
        for name, each in parameters.items():
            sums[name] += each.grad.square()
            each.grad = None
    for each in parameters.values():
        each.requires_grad_(False)
    return {name: each / chosen.numel() for name, each in sums.items()}


def steps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each size and pair of exponents."""
    scores = Scores(options.model, options.texts, options.device, options.windows)
    made = Steps(options.model, options.sources[0], options.device)
    for bits in options.bits:
        for a, b in SHAPES:
            rise = made.rounded(made.scales(a, b), bits)
            yield {"bits": bits, "columns": a, "rows": b, "parabola": round(rise, 4), **scores.of(made.model)}


def main() -> None:
    """Print a row at a time, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("samples", "texts", "steps"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=Path, nargs="*", default=[], help="texts that are scored")
    parser.add_argument("--sources", type=Path, nargs="*", default=[], help="texts that settings follow from")
    parser.add_argument("--bits", type=float, nargs="+", default=[3.0, 4.0])
    parser.add_argument("--steps", type=int, default=0, help="of `moepack tune`, after `texts`")
    parser.add_argument("--tuning", type=Path, help="text of `moepack tune`; by default the source")
    parser.add_argument("--tune-samples", type=int, default=128, help="samples of 512 tokens of that text, at most")
    parser.add_argument("--batch", type=int, default=2, help="samples of 512 tokens a step")
    parser.add_argument("--windows", type=int, default=SCORED, help="windows of each text that are scored")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    if options.study == "samples":
        options.results.write_text(samples(options), encoding="utf-8")
        return
    rows = []
    for row in (texts if options.study == "texts" else steps)(options):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.results is not None:
        device = options.device if options.device == "cpu" else torch.cuda.get_device_name(options.device)
        content = {"study": options.study, "model": options.model.name, "device": device, "rows": rows}
        options.results.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Compares predicted and measured losses of leaving experts out and of fewer bits, at equal bytes.

    python -m benches.studies.prune_estimates MODEL [MODEL ...] --texts FILE ... [--calibration built-in]
        [--samples 24] [--bits 2 3] [--shares 0 0.125] [--chars 12000] [--pack] [--threads 1]
        [--out build/prune-estimates.json]

`auto` plans every variant on the text for the same bytes: bits per weight of the whole, unpruned checkpoint. Its plan
predicts the loss of the remaining weights; with --pack, it is also measured. The loss of leaving an expert out is
predicted by the same sensitivities F, as if its down projection had an error of its own size: half the sum of F w^2,
with the curvature that `auto` expects (`methods.auto.loss.expected_rise`). It is measured by packing the pruned model
with 8 bits (`finequant`, no text).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import moepack
from benches.tools import machine
from moepack.calibration.fisher import Sensitivity, fisher
from moepack.calibration.kept import KeptSensitivity
from moepack.checkpoint import Checkpoint, MoeModel, describe
from moepack.checkpoint.pruned import PrunedCheckpoint
from moepack.evaluation import evaluate
from moepack.methods import Auto, FineQuant, Method, MethodPlan
from moepack.methods.auto.loss import expected_rise
from moepack.methods.auto.packer import Allocated
from moepack.methods.auto.target import weight_count
from moepack.methods.rate.importance import find_balances
from moepack.pipeline.estimate import estimate
from moepack.pipeline.pruning import Pruning
from moepack.pipeline.source import Source, opened
from moepack.solvers.balance import Balance

Sensitivities = Mapping[str, Sensitivity]


def sensitivities(checkpoint: Checkpoint, model: MoeModel, balances: dict[str, Balance], method: Auto) -> Sensitivities:
    """Return what `auto` measures on its text; from its cache if it is there."""
    request = method.request
    assert request is not None
    kept = KeptSensitivity(checkpoint, samples := request.load(checkpoint))
    found = kept.read() or fisher(checkpoint, model, balances, samples, torch.device("cpu"))
    assert found is not None
    kept.write(found)
    return found


def dropped_rise(found: PrunedCheckpoint, model: MoeModel, known: Sensitivities, balances: dict[str, Balance]) -> float:
    """Return the predicted loss increase of the experts that a pruned checkpoint lacks."""
    small = 0.0
    for layer in model.layers:
        kept = {member for group in found.groups[layer.name] for member, _ in group}
        down = layer.projections[-1]
        own, balance = known[down.packed_name], balances[down.packed_name]
        for expert in set(range(layer.experts)) - kept:
            rows, columns = own.rows[expert], own.columns[expert]
            weights = down.expert(expert).double() / balance.rows[expert].double()[:, None]
            weights = weights / balance.columns[expert if len(balance.columns) > 1 else 0].double()
            mean = float(rows.mean())
            small += 0.5 * float(rows @ weights.square() @ columns) / mean if mean > 0 else 0.0
    return expected_rise({"experts": small})


class Losses:
    """Losses of a model on texts.

    Attributes:
        before: the loss of the original by text.
    """

    def __init__(self, model: Path, texts: list[Path], chars: int) -> None:
        self._texts, self._chars = texts, chars
        self.before = self._of(model)

    def _of(self, model: Path) -> dict[str, float]:
        return {text.stem: evaluate(model, text, self._chars).loss for text in self._texts}

    def rise(self, source: Source, method: Method | MethodPlan) -> dict[str, float]:
        """Pack a model; return the loss increase by text."""
        with tempfile.TemporaryDirectory() as folder:
            found = self._of(moepack.compress(source, Path(folder) / "packed", method=method, check=False).path)
        return {name: round(loss - self.before[name], 4) for name, loss in found.items()}


def rows_of(path: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each share and number of bits of a model."""
    given = {"calibration": options.calibration, "samples": options.samples, "prefer": "quality"}
    checkpoint = Checkpoint.open(path)
    model, weights = describe(checkpoint), weight_count(checkpoint)
    losses, balances = Losses(path, options.texts, options.chars), find_balances(model)
    known = sensitivities(checkpoint, model, balances, Auto(**given))
    for share in options.shares:
        drop, measured = 0.0, dict[str, float]()
        with opened(path, Path(tempfile.gettempdir()) / "no") as source:
            if share:
                source.prune(Pruning(share), Auto(**given))
                assert isinstance(source.checkpoint, PrunedCheckpoint)
                drop = dropped_rise(source.checkpoint, model, known, balances)
                measured = losses.rise(source, FineQuant(bits=8, dense_bits=8, calibration=None))
            for bits in options.bits:
                method = Auto(size=int(weights * bits / 8), **given)
                plan = estimate(source, Path(tempfile.gettempdir()) / "no", method).plan
                assert plan is not None and isinstance(plan.packer, Allocated)
                row = {"model": path.name, "bits": bits, "share": share, "predicted_bits": round(plan.packer.loss, 4)}
                row |= {"predicted_drop": round(drop, 4), "measured_drop": measured}
                yield row | ({"measured": losses.rise(source, plan)} if options.pack else {})


def main() -> None:
    """Measure all models; save after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--calibration", default="built-in")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--bits", type=float, nargs="+", default=[2.0, 3.0])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.125])
    parser.add_argument("--chars", type=int, default=12_000)
    parser.add_argument("--pack", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/prune-estimates.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for path in options.models:
        for row in rows_of(path, options):
            print(row, flush=True)
            rows.append(row)
            machine.save(options.out, options.threads, rows)


if __name__ == "__main__":
    main()

"""Compares `auto` with single methods at equal sizes of the whole checkpoint, and with its own plan.

    python -m benches.quality.auto_sizes MODEL [MODEL ...] --calibration FILE --text FILE [--text FILE]
        [--bits 0.9 1.3 2 2.5 3 4 5] [--methods auto rate qmoe milo finequant] [--samples 64] [--chars 100000]
        [--threads 1] [--processes 1] [--device cpu] [--table] [--out build/auto-sizes.json]

Sizes are bits per weight over the whole checkpoint, including all of its safetensors files. Prints actual over
requested size, the loss increase by text, and for `auto` the planned increase, time and memory; finally, the difference
of `auto` to the best single method of no larger size. --merge prepends figures of earlier runs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benches.tools import machine
from moepack.comparison import FITTING, Comparison

Rows = list[dict[str, Any]]

SCORED = ("wikitext2-test", "heldout-books")
"""Texts of the summary; the plan's constants were fitted to other texts."""


def summary(rows: Rows) -> dict[str, Any]:
    """Over all sizes, models and texts: the mean ratio of `auto`'s increase to that of the best single method of at
    most 1.01 times its size, and the largest difference in nats."""
    ratios, above = [], []
    for row in (row for row in rows if row["method"] == "auto"):
        others = [
            other
            for other in rows
            if other["model"] == row["model"] and "auto" not in other["method"] and other["size"] <= 1.01 * row["size"]
        ]
        for text, rise in row["rise"].items():
            if others and text in SCORED:
                best = min(other["rise"][text] for other in others)
                ratios.append(max(rise, 1e-4) / max(best, 1e-4))
                above.append(rise - best)
    return {"compared": len(ratios), "mean_ratio": _mean(ratios), "most_above": max(above, default=math.nan)}


def table(rows: Rows) -> str:
    """For each size and model: the losses of `auto` and of the best single method by text, and the plan of `auto`."""
    models = sorted({row["model"] for row in rows if row["method"] == "auto"})
    lines = [f"| bits | {' | '.join(models)} |", "|---" * (1 + len(models)) + "|"]
    for bits in sorted({row["bits"] for row in rows if row["method"] == "auto"}):
        cells = []
        for model in models:
            here = [row for row in rows if (row["model"], row["bits"]) == (model, bits)]
            found = next(row for row in here if row["method"] == "auto")
            cell = f"{_rises(found)}, plan {found['expected_rise']:+.4f}"
            if others := [row for row in here if "auto" not in row["method"]]:
                best = min(others, key=lambda row: sum(row["rise"].values()))
                cell += f"; {best['method']} {_rises(best)}"
            cells.append(cell)
        lines.append(f"| {bits:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _rises(row: dict[str, Any]) -> str:
    return ", ".join(f"{row['rise'][text]:+.4f}" for text in SCORED)


def _mean(ratios: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


@cache
def _compared(path: Path, texts: tuple[Path, ...], chars: int, device: str) -> Comparison:
    """A model and the losses of the original, measured once per process."""
    return Comparison(path, texts, chars, device)


def measured(task: tuple[Path, float, str], options: argparse.Namespace) -> Rows:
    """The row of a model, a size in bits over the whole checkpoint, and a method; None if the method has no such
    size."""
    path, bits, method = task
    torch.set_num_threads(options.threads)
    compared = _compared(path, tuple(options.text), options.chars, options.device)
    weights = sum(math.prod(compared.checkpoint.info(name).shape) for name in compared.checkpoint.names())
    text = {"calibration": str(options.calibration), "samples": options.samples, "device": options.device}
    points = compared.points([int(bits * weights / 8)], [method], text)
    return [{"model": path.name, "bits": bits, **point.to_json()} for point in points]


def main() -> None:
    """Measure every method at every size; print a line for each, and save the figures as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--text", action="append", type=Path, default=[])
    parser.add_argument("--bits", nargs="+", type=float, default=[0.9, 1.3, 2, 2.5, 3, 4, 5])
    parser.add_argument("--methods", nargs="+", choices=FITTING, default=["auto", "rate", "qmoe", "milo", "finequant"])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--chars", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--merge", action="append", type=Path, default=[])
    parser.add_argument("--table", action="store_true", help="print the results as Markdown")
    parser.add_argument("--out", type=Path, default=Path("build/auto-sizes.json"))
    options = parser.parse_args()
    rows: Rows = []
    for earlier in options.merge:
        rows += json.loads(earlier.read_text())["figures"]["rows"]
    if options.merge and not options.models:
        machine.write(options.out, json.loads(options.merge[0].read_text())["machine"], {"rows": rows, **summary(rows)})
    tasks = [(path, bits, method) for method in options.methods for bits in options.bits for path in options.models]
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(measured, task, options) for task in tasks]):
            for row in done.result():
                rows.append(row)
                print(_line(row), flush=True)
            figures = {"chars": options.chars, "samples": options.samples, "rows": rows, **summary(rows)}
            machine.save(options.out, options.threads, figures, options.device)
    if options.table:
        print(table(rows))
    print(json.dumps(summary(rows)))


def _line(row: dict[str, Any]) -> str:
    rises = "  ".join(f"{text} {rise:+.4f}" for text, rise in row["rise"].items())
    made = (
        f"{row['model']:16} {row['method']:20} {row['bits']:4.2f} bits, size {row['size'] / row['wanted']:.4f}  {rises}"
    )
    if row["expected_rise"] is None:
        return made
    promised = [f"{row['expected_rise']:+.4f}"]
    promised += [f"{row[f'expected_{key}'] or math.nan:.3g} for {row[key]:.3g}" for key in ("seconds", "memory")]
    return f"{made}  plan {', '.join(promised)}"


if __name__ == "__main__":
    main()

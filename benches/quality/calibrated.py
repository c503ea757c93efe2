"""Measures fast formats with and without a text: integers in groups, codebooks per row, and `auto --prefer speed`.

    python -m benches.quality.calibrated MODEL... --calibration FILE --texts FILE FILE [--methods NAME ...]
        [--samples 64] [--windows 8] [--dense] [--threads 1] [--out FILE]
    python -m benches.quality.calibrated --table --out FILE

| name | method |
|---|---|
| int2, int3, int4 | `finequant` in groups of 64, rounded to nearest |
| int2+, int3+, int4+ | the same, solved on the text |
| book2+, book3+, book4+ | `finequant --grid codebook`, solved on the text |
| rate2+, rate3+, rate4+ | `rate` with the text, at 2.25, 3.25 and 4.25 bits |
| fast3, fast4, fast3+, fast4+ | `auto --prefer speed`, 3 and 4 bits of everything, without and with the text |

Experts alone are packed, except with `auto`; `--dense` also packs attention, shared experts and dense layers, with the
bits of the experts. Bits are those of all packed tensors, all metadata included. Loss increase and divergence from the
original are means over the first windows of 512 tokens of each text, in nats per token. Rows are saved as they are
measured and not measured again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import moepack
from benches.tools import machine
from benches.tools.scores import Scores
from moepack.format import PackedDirectory
from moepack.methods import Method, create

DEFAULT = tuple(
    f"{kind}{bits}{text}" for bits in (2, 3, 4) for kind, text in (("int", ""), ("int", "+"), ("book", "+"))
)


def method_of(name: str, seen: dict[str, Any], dense: bool) -> Method:
    """The method of a name in the table; `seen` are the settings of the text."""
    text = seen if name.endswith("+") else {"calibration": "none"}
    kind, bits = name.rstrip("+")[:-1], int(name.rstrip("+")[-1])
    if kind == "rate":
        return create("rate", bits_per_weight=bits + 0.25, roles="attention,shared,mlp" if dense else "none", **text)
    if kind == "fast":
        return create("auto", bits_per_weight=float(bits), prefer="speed", **text)
    own = {"bits": bits, "dense_bits": bits if dense else None}
    return create("finequant", **own, **({"grid": "codebook"} if kind == "book" else {}), **text)


def measure(path: Path, scores: Scores, method: Method) -> dict[str, Any]:
    """Bits, seconds, and by text the loss increase and divergence."""
    with tempfile.TemporaryDirectory() as folder:
        packed, start = Path(folder) / "packed", time.perf_counter()
        moepack.compress(path, packed, method=method, check=False)
        seconds = time.perf_counter() - start
        records = PackedDirectory.open(packed).manifest.packed().values()
        bits = 8 * sum(record.nbytes for record in records) / sum(record.weights for record in records)
        return {
            "bits": round(bits, 3),
            "seconds": round(seconds),
            "texts": scores.of(moepack.load(packed, dtype="float32")),
        }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown: bits, then increase (divergence) on each text, then the increase relative to rounding."""
    lines = [
        "| model | method | bits | increase (divergence) by text | relative to rounding |",
        "|---|---|---|---|---|",
    ]
    known = {(row["model"], row["dense"], row["method"]): row for row in rows}
    for row in rows:
        cells = ", ".join(f"{own['increase']:+.4f} ({own['divergence']:.4f})" for own in row["texts"].values())
        base, shares = known.get((row["model"], row["dense"], f"int{row['method'].rstrip('+')[-1]}")), ""
        if base is not None and base is not row and not row["method"].startswith("fast"):
            shares = ", ".join(
                f"{own['increase'] / base['texts'][text]['increase']:.2f}"
                f" ({own['divergence'] / base['texts'][text]['divergence']:.2f})"
                for text, own in row["texts"].items()
            )
        name = f"{row['model']}, all layers" if row["dense"] else row["model"]
        lines.append(f"| {name} | {row['method']} | {row['bits']:.3f} | {cells} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    """Measure each model and method; print and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--texts", nargs="+", type=Path, default=[])
    parser.add_argument("--methods", nargs="+", default=list(DEFAULT))
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/calibrated.json"))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = json.loads(options.out.read_text())["figures"]["rows"] if options.out.exists() else []
    known = {(row["model"], row["dense"], row["method"]) for row in rows}
    seen = {"calibration": str(options.calibration), "samples": options.samples}
    for path in options.models:
        wanted = [name for name in options.methods if (path.name, options.dense, name) not in known]
        scores = Scores(path, options.texts, "cpu", options.windows) if wanted else None
        for name in wanted:
            found = measure(path, scores, method_of(name, seen, options.dense))
            row = {"model": path.name, "method": name, "dense": options.dense, **found}
            rows.append({**row, "samples": options.samples, "windows": options.windows})
            print(table(rows).splitlines()[-1], flush=True)
            machine.save(options.out, options.threads, {"rows": rows})
    if options.table:
        print(table(rows))


if __name__ == "__main__":
    main()

"""Creates README's table of losses: `moepack compress`, then `moepack eval --reference`, for each model and text.

    python -m benches.quality.losses MODEL [MODEL ...] --text FILE [--text FILE] [-- COMPRESS OPTIONS]

Arguments after `--` are passed to `moepack compress`; without them, experts are rounded to ternary. Both commands run
in their own processes, as for a user; packed directories are temporary. On two cores, the five models of the README
take half an hour with 250,000 characters of two texts. Example of a calibrated table:

    python -m benches.quality.losses MODEL --text FILE -- --method qmoe --calibration TEXT --bits-per-weight 1.05
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benches.tools import machine
from moepack.format import PackedDirectory
from moepack.pipeline.report import Totals


def moepack(*arguments: str | Path) -> str:
    """Run a command of moepack and return its standard output. A failure ends this script with the command's
    message."""
    command = [sys.executable, "-m", "moepack", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed")
    return done.stdout


def measure(model: Path, texts: list[Path], chars: int, compress: list[str]) -> dict[str, Any]:
    """Bits per weight of the experts, and both losses by text in nats per token."""
    with tempfile.TemporaryDirectory() as directory:
        packed = Path(directory) / "packed"
        moepack("compress", model, packed, "--quiet", *compress)
        row: dict[str, Any] = {
            "bits_per_weight": Totals.of(PackedDirectory.open(packed).manifest).experts.bits_per_weight
        }
        for text in texts:
            printed = moepack("eval", packed, "--text", text, "--reference", model, "--chars", str(chars), "--json")
            report = json.loads(printed.splitlines()[-1])
            row[text.stem] = {"original": report["reference_loss"], "packed": report["loss"]}
    return row


def line(name: str, row: dict[str, Any], texts: list[Path]) -> str:
    """A line of the table."""
    bits = row["bits_per_weight"]
    cells = [f"{row[text.stem]['original']:.3f} → {row[text.stem]['packed']:.3f}" for text in texts]
    return f"| {name} | {bits:.3f} | {16 / bits:.1f}x | {' | '.join(cells)} |"


def main() -> None:
    """Measure every model; print the table, and save the figures."""
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", action="append", type=Path, required=True)
    parser.add_argument("--chars", type=int, default=250_000)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args(given[:end])
    print(f"| model | bits per weight | smaller than bf16 | {' | '.join(text.stem for text in options.text)} |")
    print("|---|---|---|" + "---|" * len(options.text))
    figures = {}
    for model in options.models:
        figures[model.name] = measure(model, options.text, options.chars, given[end + 1 :])
        print(line(model.name, figures[model.name], options.text), flush=True)
    if options.out:
        machine.save(options.out, len(os.sched_getaffinity(0)), figures)


if __name__ == "__main__":
    main()

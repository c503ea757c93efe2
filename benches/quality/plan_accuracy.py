"""Compares the plan of `auto` with measurements: loss increase, size, time and memory.

    python -m benches.quality.plan_accuracy benches/results/auto-sizes-*.json

Reads figures of benches/quality/auto_sizes.py. The expected increase is recomputed with the current constants from the
errors by role in each row. Prints the measured over the expected increase by text, the actual over the requested size,
and expected and measured seconds and memory, if planned; finally, how many increases are within a factor of 1.5 at 0.9
to 5 bits.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from benches.quality.auto_sizes import SCORED
from moepack.methods.auto.loss import solved_rise

WITHIN = 1.5


def main() -> None:
    """Print a line for each model and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    options = parser.parse_args()
    found = [row for file in options.results for row in json.loads(file.read_text())["figures"]["rows"]]
    rows = [row for row in found if row["method"] == "auto"]
    counted: list[float] = []
    middle: list[float] = []
    for row in sorted(rows, key=lambda row: (row["model"], row["bits"])):
        rise = solved_rise(row["errors"], row["bits"])
        ratios = {text: row["rise"][text] / rise for text in SCORED}
        if row["bits"] <= 5:
            counted += ratios.values()
            middle.append(math.sqrt(math.prod(max(ratio, 1e-3) for ratio in ratios.values())))
        shown = "  ".join(f"{text} {ratio:.2f}" for text, ratio in ratios.items())
        line = f"{row['model']:16} {row['bits']:4.2f} bits  expected {rise:+.4f}, measured over it: {shown}"
        line += f"  size {row['size'] / row['wanted']:.4f}"
        if row["expected_seconds"] is not None:
            line += f"  {row['expected_seconds']:.0f} s expected, {row['seconds']:.0f} s measured"
            line += f"  {row['expected_memory'] / 1e6:.0f} MB expected, {row['memory'] / 1e6:.0f} MB measured"
        print(line)
    for name, found in (("each text", counted), ("the mean of both", middle)):
        good = sum(1 / WITHIN <= ratio <= WITHIN for ratio in found)
        print(f"within a factor of {WITHIN} on {name}: {good} of {len(found)}")


if __name__ == "__main__":
    main()

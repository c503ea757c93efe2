"""Draw the README's picture: loss over size of a real model, moepack beside other quantizers.

    python -m benches.quality.picture [--out docs/loss-over-size.svg]

Reads only committed results: `benches/results/rivals-zen5.json` (peers, from `benches/quality/rivals.py`, 8 windows
of 512 tokens) and `benches/results/sensitivity-measured-*.json` (`python -m benches.quality.sensitivity texts`, 40
windows; of several runs of one setting, that on the H200). Sizes are bits per weight of everything with all metadata.
HQQ, GPTQModel and AutoRound leave the embedding in bfloat16, so their sizes count the quantized layers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moepack.comparison.chart import draw

RESULTS = Path(__file__).parents[1] / "results"
TEXT = "wikitext2-test"
MACHINES = ("h100", "h200")
OURS = {
    "moepack, calibrated on novels": ("calibration-books", False),
    "moepack, built-in text": ("built-in", False),
    "moepack, built-in text, tuned": ("built-in", True),
}
"""By line: the calibration text, and whether `moepack tune` followed."""
PEERS = {
    "llama.cpp, importance matrix": ("llama.cpp", "bits"),
    "GPTQModel (layers only)": ("gptqmodel", "layer_bits"),
    "AutoRound (layers only)": ("auto-round", "layer_bits"),
    "HQQ (layers only)": ("hqq", "layer_bits"),
}


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "docs/loss-over-size.svg")
    options = parser.parse_args()
    peers = json.loads((RESULTS / "rivals-zen5.json").read_text())["figures"]["rows"]
    files = [RESULTS / f"sensitivity-measured-{machine}.json" for machine in MACHINES]
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    lines = {}
    for name, (source, tuned) in OURS.items():
        chosen = [row for row in rows if row["source"] == source and ("steps" in row) == tuned]
        lines[name] = sorted({row["bits"]: row[TEXT]["increase"] for row in chosen}.items())
    for name, (peer, bits) in PEERS.items():
        found = [(row[bits], row["everything"][TEXT]["increase"]) for row in peers if row["peer"] == peer]
        lines[name] = [(x, y) for x, y in found if x < 4.8 and y < 3]
    title = "SmolLM2-135M: increase of the loss on WikiText-2, nats per token; lower is better"
    options.out.write_text(draw(title, "bits per weight", lines), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Draw the README's picture: loss over size of a real model, moepack beside other quantizers.

    python benches/picture.py [--out docs/loss-over-size.svg]

Reads committed results alone: `results/rivals-zen5.json` (peers, from `benches/rivals.py`) and the files of
`benches/sensitivity.py texts`. Sizes are bits a weight of everything, metadata counted; HQQ and GPTQModel leave the
embedding in bfloat16, so their sizes count the layers that they quantize.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moepack.comparison.chart import draw

RESULTS = Path(__file__).parent / "results"
TEXT = "wikitext2-test"
OURS = {"moepack, text of novels": "calibration-books", "moepack, built-in text": "built-in"}
PEERS = {
    "llama.cpp, imatrix": ("llama.cpp", "bits"),
    "GPTQModel (layers only)": ("gptqmodel", "layer_bits"),
    "HQQ (layers only)": ("hqq", "layer_bits"),
}


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs/loss-over-size.svg")
    options = parser.parse_args()
    measured = [
        row for file in sorted(RESULTS.glob("sensitivity-h200*.json")) for row in json.loads(file.read_text())["rows"]
    ]
    peers = json.loads((RESULTS / "rivals-zen5.json").read_text())["figures"]["rows"]
    lines = {
        name: [(row["bits"], row[TEXT]["increase"]) for row in measured if row["source"] == source and TEXT in row]
        for name, source in OURS.items()
    }
    for name, (peer, bits) in PEERS.items():
        found = [(row[bits], row["everything"][TEXT]["increase"]) for row in peers if row["peer"] == peer]
        lines[name] = [(x, y) for x, y in found if x < 4.8 and y < 3]
    title = "SmolLM2-135M: increase of the loss on WikiText-2, nats a token"
    options.out.write_text(draw(title, "bits a weight", lines), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Prints the tables of docs/gpu.md from the results of speed.py, models.py and floe.py.

python -m benches.gpu.tables
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"

SPECIFICATIONS = {
    "int2 group 64 symmetric": "int2",
    "int3 group 64 symmetric": "int3",
    "int3 group 64 asymmetric": "int3, asymmetric",
    "int4 group 64 symmetric": "int4",
    "int8 group 64 symmetric": "int8",
    "codebook 4 bits A16": "codebook, 4 bits",
    "codebook 4 bits A8": "the same, 8-bit activations",
    "fsv8": "fsv8",
}

MATRICES = ("Mixtral down", "Mixtral gate")
LAYERS = ("Mixtral-8x7B", "Qwen3-30B-A3B", "DeepSeek-V2-Lite")


def row(*cells: Any) -> None:
    """Print a row of a table."""
    print("|", *(f"{cell} |" for cell in cells))


def speeds(title: str, shapes: tuple[str, ...], tokens: tuple[int, ...], peer: str) -> None:
    """Print how many times faster than a peer each kind of tensor is, shapes side by side."""
    lines = json.loads((RESULTS / "gpu-h100.json").read_text())["lines"]
    ratios = {(each["specification"], each["what"], each["tokens"]): each["ratios"] for each in lines}
    row(title, *(f"{count} token{'s' * (count > 1)}" for count in tokens))
    print("|" + "---|" * (1 + len(tokens)))
    for specification, name in SPECIFICATIONS.items():
        found = [[ratios.get((specification, shape, count), {}).get(peer) for shape in shapes] for count in tokens]
        row(name, *(", ".join("" if ratio is None else f"{ratio:.1f}" for ratio in cell) for cell in found))
    print()


def models() -> None:
    """Print the models."""
    row("model", "GB", "tokens/s, graphs", "tokens/s, launched", "loss beside the CPU: 48 tokens", "512")
    print("|" + "---|" * 6)
    for name, found in json.loads((RESULTS / "gpu-models-h100.json").read_text())["models"].items():
        size, *rates = (found.get(key) for key in ("GB", "graphs tokens/s", "transformers tokens/s"))
        differences = (found.get(f"{window} difference") for window in ("short", "long"))
        row(
            name,
            "" if size is None else f"{size:.4f}" if size < 0.1 else f"{size:.2f}",
            *(f"{rate:.0f}" for rate in rates),
            *("" if difference is None else f"{difference:+.4f}" for difference in differences),
        )


def peers() -> None:
    """Print how many times as fast as humming-kernels with the same bits matrices are."""
    lines = json.loads((RESULTS / "gpu-peers-h100.json").read_text())["lines"]
    tokens = sorted({line["tokens"] for line in lines})
    row("matrices 4096 x 14336 and 14336 x 4096", *(f"{count} token{'s' * (count > 1)}" for count in tokens))
    print("|" + "---|" * (1 + len(tokens)))
    for name in ("int3", "int4"):
        found = {(line["what"], line["tokens"]): line for line in lines if line["specification"].startswith(name)}
        known = [[found[shape, count] for shape in MATRICES if (shape, count) in found] for count in tokens]
        ratios = [[line["ratios"][f"humming {name}"] for line in lines] for lines in known]
        row(name, *(", ".join(f"{ratio:.2f}" for ratio in cell) for cell in ratios))
    print()


def channels() -> None:
    """Print the microseconds of an expert with skipped channels."""
    lines = json.loads((RESULTS / "gpu-floe-h100.json").read_text())["lines"]
    shares = sorted({line["sparsity"] for line in lines})
    row("records, channels skipped", *(f"{share:.0%}" for share in shares))
    print("|" + "---|" * (1 + len(shares)))
    for kind in dict.fromkeys((line["records"], line["place"]) for line in lines):
        found = {line["sparsity"]: line["us"] for line in lines if (line["records"], line["place"]) == kind}
        place = kind[1].replace("gpu", "GPU")
        row(f"{kind[0]}, in memory of the {place}", *(f"{found[share]:.0f}" for share in shares))
    print()


def main() -> None:
    """Print all tables."""
    speeds("matrices " + " and ".join(("4096 x 14336", "14336 x 4096")), MATRICES, (1, 16, 32), "bf16")
    speeds("layers " + ", ".join(LAYERS), LAYERS, (1, 16, 64), "bf16 grouped_mm")
    peers()
    channels()
    models()


if __name__ == "__main__":
    main()

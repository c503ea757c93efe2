"""Compares the loss of other packages' quantizers with moepack's `auto` on a pretrained model.

    python -m benches.quality.rivals PEER MODEL --calibration FILE --texts FILE ... --results FILE [--settings WORD ...]
        [--windows 40] [--device cuda]
    python -m benches.quality.rivals table --results FILE

MODEL is a dense Llama checkpoint, such as from `benches/tools/real.py OUT --form dense`, and for the peer `moepack` the
same function with experts (`--form mixtral`). All peers are calibrated on the same 128 windows of 512 tokens from the
start of one text, and measured in the same way: the weights that a peer's runtime would use are put into transformers'
model in float32, and loss and divergence from the original are computed on windows of 512 tokens. No peer's runtime is
used.

A peer runs in its own process, whose time and memory are in the table, including reading the model. Rows are added to
the results, or replace earlier ones with the same setting, so that one file can hold peers that need different
environments. Missing peers are reported as absent, and failures with their reason.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benches.tools import machine
from benches.tools.dequantized import Dequantized
from benches.tools.quantized import is_embedding
from benches.tools.quantizers import QUANTIZERS, version
from benches.tools.scores import SCORED, Kept, Scores, windows
from moepack.integrations.loading import open_tokenizer

LENGTH = 512
"""Tokens of a window that peers are calibrated on."""


def grouped(bits: tuple[int, ...], groups: tuple[int, ...], note: str = "", **more: Any) -> dict[str, dict[str, Any]]:
    """Settings of all pairs of bits and group size, by name."""
    return {f"{b} bits, g{group}{note}": {"bits": b, "group": group, **more} for b in bits for group in groups}


KINDS = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "IQ2_XS", "IQ3_XXS", "IQ3_S", "IQ4_XS")
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "hqq": grouped((2, 3, 4), (64, 32)) | grouped((2, 3), (64,), ", along columns", axis=0),
    "gptqmodel": grouped((2, 3, 4), (64, 128)) | grouped((2, 3), (64,), ", asymmetric", symmetric=False),
    "auto-round": grouped((2, 3, 4), (64, 128)) | grouped((2, 3), (64,), ", asymmetric", symmetric=False),
    "llm-compressor": grouped((2, 3, 4), (64,), ", GPTQ") | grouped((3, 4), (64,), ", AWQ", symmetric=False, awq=True),
    "llama.cpp": {f"{kind}, imatrix": {"kind": kind, "imatrix": True} for kind in KINDS}
    | {kind: {"kind": kind} for kind in KINDS if kind != "IQ2_XS"}
    | {f"{kind}, imatrix, not folded": {"kind": kind, "imatrix": True, "folded": False} for kind in KINDS},
    "moepack": {f"auto {bits} bits, text": {"bits": bits} for bits in (2.0, 2.5, 3.0, 3.5, 4.0, 4.5)}
    | {f"auto {bits} bits": {"bits": bits, "text": False} for bits in (2.0, 2.5, 3.0, 3.5, 4.0, 4.5)},
}
"""Arguments of each peer's function by the name of a setting; all others are the package's defaults."""

Row = dict[str, Any]


def quantize(peer: str, settings: dict[str, Any], options: argparse.Namespace, out: Path) -> Row:
    """Run a quantizer in this process, and save its weights; sizes, seconds and GiB of peak memory."""
    torch.set_num_threads(options.threads)
    ids = windows(open_tokenizer(options.model), options.calibration, options.samples, LENGTH)
    start = time.perf_counter()
    made = QUANTIZERS[peer][1](options.model, ids, options.device, **settings)
    seconds = time.perf_counter() - start
    save_file(made.weights, out)
    row: Row = {"sizes": made.sizes, "seconds": round(seconds, 1), "peak_gib": _peak()}
    if options.device != "cpu":
        row["device_peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return row


def _peak() -> float:
    """The peak memory of this process in GiB; `getrusage` would include its parent's."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return round(int(found[1]) / 2**20, 2) if found else math.nan


def sizes_of(sizes: dict[str, tuple[float, int]], count: int) -> dict[str, float]:
    """Bits per weight of the layers' matrices and of all `count` weights; unquantized weights have 16."""
    layers = [size for name, size in sizes.items() if not is_embedding(name) and "norm" not in name]
    bits, weights = (sum(part) for part in zip(*layers, strict=True))
    all_bits, all_weights = (sum(part) for part in zip(*sizes.values(), strict=True))
    rest = 16 * (count - all_weights)
    return {"layer_bits": round(bits / weights, 3), "bits": round((all_bits + rest) / count, 3)}


class Bench:
    """One model, its texts, and the original to compare quantized models with."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.scores = Scores(options.model, options.texts, options.device, options.windows)
        self.scores.original = Kept(self.scores.original)
        self.model = Dequantized(options.model, options.device)
        self.count = sum(each.numel() for each in self.model.model.parameters())

    def row(self, name: str, settings: dict[str, Any]) -> Row:
        """Quantize and score, with the peer's embedding and with the original's."""
        peer = self.options.peer
        known = {"peer": peer, "setting": name, "version": version(QUANTIZERS[peer][0])}
        if known["version"] is None:
            return known | {"failure": "absent"}
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "weights.safetensors"
            try:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    found = pool.submit(quantize, peer, settings, self.options, out).result()
            except Exception as error:
                return known | {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
            weights = load_file(out)
        found |= sizes_of(found.pop("sizes"), self.count)
        found["everything"] = self._scored(weights)
        kept = {name: tensor for name, tensor in weights.items() if not is_embedding(name)}
        found["layers"] = found["everything"] if len(kept) == len(weights) else self._scored(kept)
        where = {key: machine.describe(1, self.options.device)[key] for key in ("processor", "device")}
        return known | where | {"samples": self.options.samples, "windows": self.options.windows} | found

    @torch.no_grad()
    def _scored(self, weights: dict[str, torch.Tensor]) -> dict[str, dict[str, float]]:
        state = self.model.original().state_dict()
        for name, tensor in weights.items():
            state[name].copy_(tensor)
        return self.scores.of(self.model.model)


def table(rows: list[Row]) -> str:
    """Sizes, loss increase and divergence on each text, seconds and memory, by peer and bits, as Markdown."""
    texts = list(next(row["layers"] for row in rows if "layers" in row))
    lines = [
        f"| quantizer | setting | bits, layers | increase of layers alone: {', '.join(texts)} | divergence "
        "| bits, everything | increase of everything | s | GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    measured = [row for row in rows if "layers" in row]
    for row in sorted(measured, key=lambda row: (list(SETTINGS).index(row["peer"]), row["layer_bits"])):
        cells = [row["peer"], row["setting"], f"{row['layer_bits']:.2f}", _figures(row["layers"], "increase", "+.3f")]
        cells += [_figures(row["layers"], "divergence", ".3f"), f"{row['bits']:.2f}"]
        cells += [_figures(row["everything"], "increase", "+.3f"), f"{row['seconds']:.0f}", f"{row['peak_gib']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    failures = [f"- {row['peer']}, {row['setting']}: {row['failure']}" for row in rows if "failure" in row]
    return "\n".join([*lines, "", *failures])


def _figures(scores: dict[str, dict[str, float]], figure: str, form: str) -> str:
    return ", ".join(format(score[figure], form) for score in scores.values())


def main() -> None:
    """Measure a peer's settings one at a time and save each, or print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=(*SETTINGS, "table"))
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--texts", type=Path, nargs="+", default=[])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--settings", nargs="*", help="names of settings; default: all of the peer")
    parser.add_argument(
        "--set", default="{}", type=json.loads, help="additional arguments of the peer's function, as JSON"
    )
    parser.add_argument("--windows", type=int, default=SCORED, help="windows per evaluation text")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    rows = json.loads(options.results.read_text())["figures"]["rows"] if options.results.exists() else []
    if options.peer == "table":
        print(table(rows))
        return
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    for name in options.settings or SETTINGS[options.peer]:
        label = ", ".join([name, *(f"{key} {value}" for key, value in options.set.items())])
        row = bench.row(label, SETTINGS[options.peer][name] | options.set)
        rows = [other for other in rows if (other["peer"], other["setting"]) != (row["peer"], row["setting"])] + [row]
        print(json.dumps(row), flush=True)
        machine.save(options.results, options.threads, {"rows": rows}, options.device)


if __name__ == "__main__":
    main()

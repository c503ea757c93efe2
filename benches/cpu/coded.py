"""Measures coded integers against int4: size over entropy, and speed of encoding, decoding, look-ups and products.

    python -m benches.cpu.coded --threads 1 --out build/coded.json

Codes are those of a Gaussian or Laplace source, rounded to multiples of a step that gives the requested entropy: at
0.63 bits, Gaussian codes are ternary, with 88.5 % zeros. Speeds are 10^9 weights per second; for products, over all
tokens; for decoding, including all checks. Look-ups are in microseconds per random row, with one or 512 rows per call.
Products cycle through copies of a tensor that together exceed every cache. The fastest call counts, measured by the
processor time of one thread, which other load disturbs less, or otherwise by the clock.

Next to int8 products, the speed relative to int4 with as many threads is printed and, for one token, the number of such
cores from which memory is the limit: the bytes that all cores together read per second, over the bytes that one core
decodes per second.
"""

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benches.tools import machine
from benches.tools.peers import aligned, encode
from moepack import _core

SOURCES = ("gaussian", "laplace")
ENTROPIES = (0.63, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 6.0, 7.5)
MODES = ("int8", "exact", "auto")
LOW_BITS_ABOVE = 5
"""Bits of entropy above which symbols have low bits beside them."""


def entropy(codes: NDArray[np.int16]) -> float:
    """Bits per code, from the frequencies of the codes."""
    shares = np.unique(codes, return_counts=True)[1] / codes.size
    return float(-(shares * np.log2(shares)).sum())


def draw(source: str, bits: float, rows: int, columns: int) -> NDArray[np.int16]:
    """Codes with about the given entropy in bits."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((1, rows, columns)) if source == "gaussian" else rng.laplace(size=(1, rows, columns))
    low, high = 0.01, 10.0
    for _ in range(30):
        step = math.sqrt(low * high)
        low, high = (step, high) if entropy(np.rint(values[0, :256] / step).astype(np.int16)) > bits else (low, step)
    return np.rint(values / step).astype(np.int16)


def followed(indices: NDArray[np.int16]) -> NDArray[np.int16]:
    """The dependent codes of indices."""
    after = np.array([(0, 2), (5, 7), (1, 3), (6, 4), (2, 0), (4, 6), (3, 1), (7, 5)])
    codes, states = np.empty_like(indices), np.zeros((*indices.shape[:2], 4), np.int64)
    for column in range(indices.shape[2]):
        index, state = indices[..., column], states[..., column % 4]
        codes[..., column] = (4 * index + 1) * (1 - 2 * (state % 2))
        states[..., column % 4] = after[state, index % 2]
    return codes


def fastest(calls: Iterator[Callable[[], object]], options: argparse.Namespace) -> float:
    """The time of the fastest of at least three calls."""
    clock = time.process_time if options.threads == 1 else time.perf_counter
    best, end = math.inf, time.perf_counter() + options.seconds
    for number, call in enumerate(calls):
        if number >= 3 and time.perf_counter() > end:
            break
        start = clock()
        call()
        best = min(best, clock() - start)
    return best


def products(data: NDArray[np.uint8], weights: int, options: argparse.Namespace) -> dict[str, float]:
    """The speed of each mode and number of tokens."""
    copies = max(1, min(8, options.cold // data.nbytes))
    blobs = [_core.PackedTensor(aligned(data)) for _ in range(copies)]
    figures = {}
    for tokens in options.tokens:
        x = np.random.default_rng(tokens).standard_normal((tokens, blobs[0].shape[2])).astype(np.float32)
        for mode in MODES:
            calls = (partial(blob.matmul, x, mode=mode) for blob in itertools.cycle(blobs))
            figures[f"{mode} {tokens}"] = round(tokens * weights / fastest(calls, options) / 1e9, 2)
    return figures


def memory_speed(nbytes: int = 1 << 29) -> float:
    """Bytes per second that all cores together read from an array larger than any cache."""
    cores = os.cpu_count() or 1
    parts = np.array_split(np.ones(nbytes // 8, np.int64), cores)
    best, rounds = math.inf, 5
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(rounds):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - start)
    return nbytes / best


def beside(row: dict[str, Any], int4: dict[str, Any], memory: float, options: argparse.Namespace) -> dict[str, float]:
    """Speed relative to int4, and the number of cores from which memory limits one token."""
    keys = [f"int8 {tokens}" for tokens in options.tokens]
    found = {f"{key} of int4": round(row[key] / int4[key], 3) for key in keys}
    if 1 in options.tokens:
        decoded = row["int8 1"] / options.threads * 1e9 * row["bits"] / 8
        found["cores to memory"] = round(memory / decoded, 1)
    return found


def look_ups(data: NDArray[np.uint8], options: argparse.Namespace) -> dict[str, float]:
    """Microseconds per row of looking up one row and many."""
    blob, rng = _core.PackedTensor(data), np.random.default_rng(0)
    figures = {}
    for count in (1, 512):
        calls = (partial(blob.look_up, rng.integers(0, blob.shape[1], count), "bfloat16") for _ in itertools.count())
        figures[f"look up {count}"] = round(1e6 * fastest(calls, options) / count, 2)
    return figures


def measure(source: str, bits: float, columns: int, options: argparse.Namespace) -> dict[str, Any]:
    """Size and speeds of one tensor."""
    symbols = "dependent" if options.dependent else "plain+3" if bits > LOW_BITS_ABOVE else "plain"
    rows = options.weights // columns
    codes, one = draw(source, bits, rows, columns), np.ones((1, 1), np.float32)
    given = followed(codes) if options.dependent else codes
    make = partial(_core.encode_coded, given, one, ndim=2, symbols=symbols)
    data = make()
    blob, exact = _core.PackedTensor(data), entropy(codes)
    stored = 8 * data.nbytes / codes.size
    encoding, decoding = (fastest(itertools.repeat(call), options) for call in (make, blob.verify))
    return {
        "source": source, "columns": columns, "symbols": blob.details()["symbols"],
        "entropy": round(exact, 3), "bits": round(stored, 4),
        "efficiency": round(100 * exact / stored, 2), "tables": blob.details()["tables"],
        "exceptions": blob.details()["exceptions"] / codes.size,
        "encode": round(codes.size / encoding / 1e9, 3),
        "decode": round(codes.size / decoding / 1e9, 2),
        **look_ups(data, options),
        **products(data, codes.size, options),
    }  # fmt: skip


def main() -> None:
    """Measure everything and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dependent", action="store_true", help="use dependent codes with the source as indices")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    parser.add_argument("--weights", type=int, default=1 << 24, help="of a tensor")
    parser.add_argument("--columns", type=int, nargs="*", default=[256, 2048])
    parser.add_argument("--entropies", type=float, nargs="*", default=ENTROPIES)
    parser.add_argument("--sources", nargs="*", default=SOURCES, choices=SOURCES)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--cold", type=int, default=1 << 27, help="total bytes of the copies in a round of products")
    parser.add_argument("--out", type=Path, default=Path("build/coded.json"))
    options = parser.parse_args()
    _core.set_threads(options.threads)
    memory = memory_speed()
    written = {"machine": machine.describe(options.threads), "kernel": _core.kernels()["coded"], "figures": []}
    written["memory"] = round(memory / 1e9, 1)
    print(written, flush=True)
    for columns in options.columns:
        plain = encode((1, options.weights // columns, columns), 4, 64)
        int4 = {"source": "int4 group 64", "columns": columns, **products(plain, options.weights, options)}
        cases = itertools.product(options.sources, options.entropies)
        rows = (measure(source, bits, columns, options) for source, bits in cases)
        for row in (int4, *(row | beside(row, int4, memory, options) for row in rows)):
            written["figures"].append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()

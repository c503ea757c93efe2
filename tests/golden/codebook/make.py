"""Write the golden files: small codebook tensors, by the reference writer, and what they hold.

    PYTHONPATH=tests python tests/golden/codebook/make.py

Packed tensors of released versions stay readable for ever, so files here are added and never changed.
"""

import json
import pathlib

import numpy as np

from oracle.codebook import Tensor, write

HERE = pathlib.Path(__file__).parent

#: name: (shape, rank, bits, block, activation bits[, Hadamard width])
CASES = {
    "four_bits": ((1, 17, 70), 2, 4, 128, 0),
    "four_bits_blocks": ((2, 3, 300), 3, 4, 128, 8),
    "three_bits": ((2, 5, 40), 3, 3, 128, 4),
    "three_bits_blocks": ((1, 2, 260), 2, 3, 256, 0),
    "two_bits": ((1, 20, 130), 2, 2, 256, 8),
    "one_weight": ((1, 1, 1), 2, 4, 128, 0),
    "no_experts": ((0, 4, 8), 3, 2, 128, 0),
    "no_rows": ((2, 0, 8), 3, 3, 128, 0),
    "no_columns": ((2, 3, 0), 3, 4, 128, 0),
    "turned": ((2, 5, 192), 3, 4, 128, 4, 64),
}


def tensor(seed: int, shape: tuple[int, int, int], rank: int, bits: int, block: int, activation_bits: int) -> Tensor:
    """A random tensor."""
    rng = np.random.default_rng(seed)
    books = (*shape[:2], -(-shape[2] // block))
    centroids = np.sort(rng.integers(-32639, 32640, (*books, 1 << bits)), -1).astype(np.int16)
    if activation_bits:
        centroids = ((centroids.astype(np.int64) + 128) // 256 * 256).astype(np.int16)
    scales = (rng.integers(0, 1000, books) / 2**20).astype(np.float32)
    codes = rng.integers(0, 1 << bits, shape).astype(np.uint8)
    return Tensor(bits, block, rank, activation_bits, codes, centroids, scales)


def main() -> None:
    """Write NAME.bin for each case, and cases.json."""
    cases = []
    for seed, (name, (shape, rank, bits, block, activation_bits, *turned)) in enumerate(CASES.items()):
        made = tensor(seed, shape, rank, bits, block, activation_bits)
        made.hadamard = turned[0] if turned else 1
        (HERE / f"{name}.bin").write_bytes(write(made))
        case = {"name": name, "shape": shape, "rank": rank, "bits": bits, "block": block}
        case |= {"hadamard": turned[0]} if turned else {}
        lists = {"centroids": made.centroids.ravel().tolist(), "scales": [float(s) for s in made.scales.ravel()]}
        codes = made.codes.tobytes().hex()
        cases.append({**case, "activation_bits": activation_bits, "codes": codes, **lists})
    (HERE / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()

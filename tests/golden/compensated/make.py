"""Write the golden files: small compensated tensors, by the reference writer, and what they hold.

Of the weights that is each row's product with the numbers -3 to 3, again and again.

    PYTHONPATH=tests python tests/golden/compensated/make.py

Packed tensors of released versions stay readable for ever, so files here are added and never changed.
"""

import json
import pathlib
from typing import Any

import numpy as np

from oracle import groupwise
from oracle.compensated import Factor, Tensor, write

HERE = pathlib.Path(__file__).parent

#: name: (shape, rank, bits, group, symmetric, bits of the factors, ranks of the experts)
CASES = {
    "three_bits": ((2, 20, 70), 3, 3, 64, False, 3, (5, 8)),
    "three_bits_symmetric": ((3, 17, 65), 3, 3, 32, True, 3, (0, 16, 1)),
    "two_bits_by_eight": ((1, 66, 130), 2, 2, 64, False, 8, (8,)),
    "four_bits_by_halves": ((2, 9, 40), 3, 4, 16, True, 16, (4, 0)),
    "one_weight": ((1, 1, 1), 2, 3, 64, False, 3, (1,)),
    "no_ranks": ((2, 3, 4), 3, 3, 64, False, 3, (0, 0)),
    "no_experts": ((0, 3, 4), 3, 3, 64, False, 8, ()),
    "no_columns": ((1, 3, 0), 2, 3, 64, False, 16, (0,)),
}


def factor(rng: np.random.Generator, bits: int, total: int, length: int) -> Factor:
    if bits == 16:
        return Factor(None, None, rng.integers(-512, 513, (total, length)).astype(np.float32) / 256)
    scales = rng.integers(-128, 129, (total, -(-length // 64))).astype(np.float32) / 1024
    return Factor(rng.integers(0, 2**bits, (total, length)).astype(np.uint8), scales, None)


def tensor(seed: int, shape: Any, rank: int, bits: int, group: int, symmetric: bool, width: int, ranks: Any) -> Tensor:
    rng = np.random.default_rng(seed)
    size = (*shape[:2], -(-shape[2] // group))
    scales, offsets = (rng.integers(-128, 129, size).astype(np.float32) / 1024 for _ in range(2))
    codes = rng.integers(0, 2**bits, shape).astype(np.uint8)
    base = groupwise.Tensor(bits, group, "float16", rank, codes, scales, None if symmetric else offsets)
    total = sum(ranks)
    return Tensor(base, width, [*ranks], factor(rng, width, total, shape[2]), factor(rng, width, total, shape[1]))


def listed(found: Factor) -> dict[str, Any]:
    if found.codes is None or found.scales is None:
        assert found.values is not None
        return {"values": [float(v) for v in found.values.ravel()]}
    return {"codes": found.codes.tobytes().hex(), "scales": [float(v) for v in found.scales.ravel()]}


def main() -> None:
    """Write NAME.bin for each case, and cases.json."""
    cases = []
    for seed, (name, (shape, *rest)) in enumerate(CASES.items()):
        made = tensor(seed, shape, *rest)
        (HERE / f"{name}.bin").write_bytes(write(made))
        products = made.weights() @ (np.arange(shape[2]) % 7 - 3.0)
        about = {"name": name, "shape": shape, "rank": made.base.rank, "rank_bits": made.bits, "ranks": made.ranks}
        cases.append({**about, "right": listed(made.right), "left": listed(made.left)})
        cases[-1]["products"] = [float(v) for v in products.ravel()]
    (HERE / "cases.json").write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


if __name__ == "__main__":
    main()

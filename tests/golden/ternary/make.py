"""Write the golden files: small packed tensors and what they decode to.

    python tests/golden/ternary/make.py

Packed tensors of released versions stay readable for ever, so files here are added and never changed.
"""

import json
import pathlib

import numpy as np

from moepack import _core

HERE = pathlib.Path(__file__).parent


def rows(shape: tuple[int, int, int], shares: list[tuple[float, float]], seed: int) -> np.ndarray:
    """Independent codes; the rows take (share of zeros, share of negatives among the others) in turn."""
    rng = np.random.default_rng(seed)
    codes = np.zeros(shape, np.int8)
    for i, row in enumerate(codes.reshape(shape[0] * shape[1], shape[2])):
        p0, share = shares[i % len(shares)]
        row[:] = rng.choice([0, -1, 1], shape[2], p=[p0, (1 - p0) * share, (1 - p0) * (1 - share)])
    return codes


SPARSE = [(0.885, 0.5), (0.9, 0.6), (0.86, 0.4)]
MIXED = [(0.5, 0.5), (0.7, 0.2), (0.885, 0.8), (0.97, 0.5), (1, 0), (0, 0.5), (0.3, 1)]
#: name: (shape, rank, shares, level unit)
CASES = {
    "matrix": ((1, 66, 130), 2, SPARSE, 2**-7),
    "experts": ((3, 5, 77), 3, MIXED, 1 + 2**-8),
    "wide": ((1, 3, 16_381), 2, [(0.97, 0.5), (1, 0), (0.995, 0.3)], 1 + 2**-20),
    "one_weight": ((1, 1, 1), 2, [(0, 1)], 1.0),
    "symmetric": ((2, 9, 100), 3, SPARSE, 2**-3),
    "no_experts": ((0, 4, 8), 3, SPARSE, 1.0),
    "no_rows": ((2, 0, 8), 3, SPARSE, 1.0),
    "no_columns": ((2, 3, 0), 3, SPARSE, 1.0),
}


def text(codes: np.ndarray) -> list[str]:
    """Spell every row, a character a code."""
    flat = codes.reshape(codes.shape[0] * codes.shape[1], codes.shape[2])
    return ["".join("-0+"[code + 1] for code in row) for row in flat]


def main() -> None:
    """Write NAME.CODE.bin for each case and code, and cases.json."""
    cases = []
    for seed, (name, (shape, rank, shares, unit)) in enumerate(CASES.items()):
        codes = rows(shape, shares, seed)
        steps = 1 + np.arange(shape[0] * shape[1], dtype=np.float32).reshape(*shape[:2], 1) % 4
        pair = [-1, 1] if name == "symmetric" else [-0.5, 1]
        levels = (np.array(pair, np.float32) * steps * np.float32(unit)).astype(np.float32)
        case = {"name": name, "shape": shape, "rank": rank, "rows": text(codes)}
        for code in ("fsv8", "dict16"):
            data = _core.encode_ternary(codes, levels, ndim=rank, code=code)
            (HERE / f"{name}.{code}.bin").write_bytes(data.tobytes())
            case["level_dtype"] = _core.PackedTensor(data).details()["level_dtype"]
        cases.append(case | {"levels": [float(level) for level in levels.ravel()]})
    (HERE / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()

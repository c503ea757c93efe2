"""Write the golden files: small group-wise tensors, by the reference writer, and what they hold.

    PYTHONPATH=tests python tests/golden/groupwise/make.py

Packed tensors of released versions stay readable for ever, so files here are added and never changed.
"""

import json
import pathlib

import numpy as np

from oracle.groupwise import Tensor, write

HERE = pathlib.Path(__file__).parent

#: name: (shape, rank, bits, group (0: the row), dtype, symmetric)
CASES = {
    "two_bits": ((2, 17, 130), 3, 2, 64, "float16", False),
    "three_bits": ((1, 20, 100), 2, 3, 32, "bfloat16", False),
    "three_bits_symmetric": ((2, 3, 70), 3, 3, 16, "float16", True),
    "four_bits": ((1, 16, 256), 2, 4, 128, "float16", False),
    "four_bits_rows": ((1, 18, 40), 2, 4, 0, "bfloat16", True),
    "eight_bits": ((1, 5, 300), 2, 8, 256, "bfloat16", True),
    "eight_bits_rows": ((2, 2, 33), 3, 8, 0, "float16", False),
    "one_weight": ((1, 1, 1), 2, 4, 16, "float16", False),
    "no_experts": ((0, 4, 8), 3, 2, 16, "float16", False),
    "no_rows": ((2, 0, 8), 3, 3, 16, "float16", True),
    "no_columns": ((2, 3, 0), 3, 8, 0, "bfloat16", False),
}


def tensor(seed: int, shape: tuple[int, int, int], rank: int, bits: int, group: int, dtype: str, symmetric: bool):
    rng = np.random.default_rng(seed)
    columns = shape[2]
    groups = min(columns, 1) if group == 0 else -(-columns // group)
    scales, offsets = (rng.integers(-128, 129, (*shape[:2], groups)).astype(np.float32) / 1024 for _ in range(2))
    codes = rng.integers(0, 2**bits, shape).astype(np.uint8)
    return Tensor(bits, group, dtype, rank, codes, scales, None if symmetric else offsets)


def main() -> None:
    """Write NAME.bin for each case, and cases.json."""
    cases = []
    for seed, (name, (shape, rank, bits, group, dtype, symmetric)) in enumerate(CASES.items()):
        made = tensor(seed, shape, rank, bits, group, dtype, symmetric)
        (HERE / f"{name}.bin").write_bytes(write(made))
        parameters = {"scales": made.scales, "offsets": made.offsets}
        lists = {key: None if p is None else [float(v) for v in p.ravel()] for key, p in parameters.items()}
        codes = made.codes.tobytes().hex()
        case = {"name": name, "shape": shape, "rank": rank, "bits": bits, "group": group, "dtype": dtype}
        cases.append({**case, "codes": codes, **lists})
    (HERE / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()

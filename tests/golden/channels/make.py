"""Write the golden files: small tensors of channels, by the reference writer, and what they hold.

    PYTHONPATH=tests python tests/golden/channels/make.py

Packed tensors of released versions stay readable for ever, so files here are added and never changed.
"""

import json
import pathlib

import numpy as np

from oracle.channels import GROUP, Tensor, write

HERE = pathlib.Path(__file__).parent

#: name: (experts, channels, columns of a half), bits
CASES = {
    "four_bits": ((2, 5, 70), 4),
    "eight_bits": ((3, 4, 64), 8),
    "bf16": ((1, 6, 100), 16),
    "one_channel": ((1, 1, 1), 4),
    "no_experts": ((0, 4, 8), 8),
    "no_channels": ((2, 0, 8), 16),
    "no_columns": ((2, 3, 0), 4),
}


def tensor(seed: int, shape: tuple[int, int, int], bits: int) -> Tensor:
    rng = np.random.default_rng(seed)
    experts, channels, half = shape
    groups = 0 if bits == 16 else -(-half // GROUP)
    scales = rng.integers(-128, 129, (experts, channels, 2, groups)).astype(np.float32) / 1024
    thresholds = np.where(np.arange(experts) == 1, np.inf, rng.integers(0, 64, experts) / 32).astype(np.float32)
    if bits == 16:
        values = (rng.integers(-128, 129, (experts, channels, 2 * half)) / 256).astype(np.float32)
        return Tensor(bits, (values.view(np.uint32) >> 16).astype(np.int64), scales, thresholds)
    codes = rng.integers(-(1 << bits - 1), 1 << bits - 1, (experts, channels, 2 * half))
    return Tensor(bits, codes, scales, thresholds)


def main() -> None:
    """Write NAME.bin for each case, and cases.json."""
    cases = []
    for seed, (name, (shape, bits)) in enumerate(CASES.items()):
        made = tensor(seed, shape, bits)
        (HERE / f"{name}.bin").write_bytes(write(made))
        case = {"name": name, "shape": shape, "bits": bits, "values": made.weights().ravel().tolist()}
        thresholds = [value if np.isfinite(value) else "infinity" for value in made.thresholds.tolist()]
        cases.append({**case, "thresholds": thresholds})
    (HERE / "cases.json").write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


if __name__ == "__main__":
    main()

"""Try the extension of a wheel by itself: it reads the golden files, and multiplies the same on every instruction set.

    python .ci/try_extension.py dist/moepack-*.whl

Takes NumPy alone, so that it runs under an emulator of another processor too. The hash that it prints last is that of
exact and int8 products of integers: the same on every processor.
"""

import hashlib
import importlib.util
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
SHAPE = (2, 40, 256)
TOKENS = (1, 3, 7)


def extension(wheel: str, folder: str) -> Any:
    """Import the extension of a wheel, and nothing of its package."""
    with zipfile.ZipFile(wheel) as files:
        path = files.extract("moepack/_core.abi3.so", folder)
    spec = importlib.util.spec_from_file_location("moepack._core", path)
    assert spec and spec.loader
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    return core


def read_golden(core: Any) -> int:
    """Read every golden file to the last byte; return how many there are."""
    files = [path for path in sorted(GOLDEN.rglob("*")) if path.suffix in {".bin", ".coded"}]
    for path in files:
        tensor = core.PackedTensor(np.fromfile(path, np.uint8))
        tensor.verify()
        tensor.dequantize()
    return len(files)


def products(core: Any) -> str:
    """Multiply by random integers of all bits, as they are and entropy coded; return the hash of the products."""
    random, digest = np.random.default_rng(7), hashlib.sha256()
    blobs = []
    for bits in (2, 3, 4, 8):
        codes = random.integers(0, 2**bits, SHAPE, dtype=np.uint8)
        scales, offsets = random.integers(1, 200, (2, *SHAPE[:2], 4)).astype(np.float32) / 256
        blobs.append(core.encode_groupwise(codes, scales, offsets, bits=bits, group_size=64, ndim=3))
    normal = random.integers(-9, 10, (3, *SHAPE)).sum(axis=0).astype(np.int8)
    blobs.append(core.encode_coded(normal, np.full(SHAPE[:2], 0.5, np.float32), ndim=3))
    for blob in blobs:
        tensor = core.PackedTensor(blob)
        for tokens in TOKENS:
            x = random.integers(-1000, 1001, (tokens, SHAPE[2])).astype(np.float32) / 64
            modes = ("int8",) if tensor.kind == "coded" else ("exact", "int8")
            for mode in modes:
                found = [tensor.matmul(x, 1, mode, isa) for isa in core.available_isas()]
                assert all(np.array_equal(found[0], other) for other in found), (tensor.kind, mode)
                digest.update(found[0].tobytes())
    return digest.hexdigest()


def main() -> None:
    """Try the wheel that the command line names."""
    with tempfile.TemporaryDirectory() as folder:
        core = extension(sys.argv[1], folder)
        print(f"{read_golden(core)} golden files, {', '.join(core.available_isas())}: {core.kernels()}")
        print(products(core))


if __name__ == "__main__":
    main()

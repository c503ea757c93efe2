"""From a packed directory to what other programs read.

`bf16` writes an ordinary checkpoint with dequantized weights, from any packed directory; `compressed-tensors` writes
integers as vLLM and compressed-tensors read them (`pack-quantized`), `gguf` as llama.cpp's blocks (Q4_0, Q8_0), both
without changing a value, and only where their layouts can hold what is packed.
"""

from collections.abc import Callable
from os import PathLike
from pathlib import Path

from moepack.export.bf16 import export_bf16
from moepack.export.compressed_tensors import export_compressed_tensors
from moepack.export.gguf import export_gguf
from moepack.format.atomic import refuse_existing

__all__ = ["TARGETS", "export"]

TARGETS: dict[str, Callable[[Path, Path], int]] = {
    "bf16": export_bf16,
    "compressed-tensors": export_compressed_tensors,
    "gguf": export_gguf,
}
"""The formats by name; each is called with the packed directory and what is to be made, and returns bytes written."""


def export(directory: str | PathLike[str], out: str | PathLike[str], to: str = "bf16") -> int:
    """Write a packed directory in another format. The tensors stream: one projection of a layer is held at a time.

    Args:
        directory: what `moepack compress` wrote.
        out: the directory (for `gguf` the file) to be made; it must not exist.
        to: "bf16", "compressed-tensors" or "gguf".

    Returns:
        Bytes written.

    Raises:
        ValueError: there is no such format.
        UnsupportedModelError: the format cannot hold what is packed; says which tensor and why.
        LoadError, CorruptionError: the directory cannot be read.
        OutputExistsError: `out` exists.
        DiskError: the disk refused.
    """
    if to not in TARGETS:
        raise ValueError(f"unknown format '{to}'; there is: {', '.join(TARGETS)}")
    refuse_existing(Path(out))
    return TARGETS[to](Path(directory), Path(out))

"""Exports packed directories to formats that other programs read.

`bf16` writes an ordinary checkpoint with dequantized weights, from any packed directory. `compressed-tensors` writes
integers in the layout `pack-quantized` of vLLM and compressed-tensors, `gguf` in the blocks of llama.cpp (Q4_0, Q8_0).
Both keep every value exactly, and support only packed formats that fit their layouts.
"""

from collections.abc import Callable
from os import PathLike
from pathlib import Path

from moepack.export.bf16 import export_bf16
from moepack.export.compressed_tensors import export_compressed_tensors
from moepack.export.gguf import export_gguf
from moepack.format.atomic import refuse_existing
from moepack.format.manifest import MANIFEST

__all__ = ["TARGETS", "export"]

TARGETS: dict[str, Callable[[Path, Path], int]] = {
    "bf16": export_bf16,
    "compressed-tensors": export_compressed_tensors,
    "gguf": export_gguf,
}
"""Export functions by format name. Each takes the packed directory and the output, and returns the bytes written."""


def export(
    directory: str | PathLike[str],
    out: str | PathLike[str],
    to: str = "bf16",
    adapter: str | PathLike[str] | None = None,
) -> int:
    """Write a packed directory in another format. Memory holds one projection of one layer at a time.

    Args:
        directory: a directory written by `moepack compress`.
        out: output directory (for `gguf`, a file). It must not exist.
        to: "bf16", "compressed-tensors" or "gguf".
        adapter: directory of a LoRA adapter saved by peft, merged into the decoded weights (bf16 only).

    Returns:
        Number of bytes written.

    Raises:
        ValueError: unknown format, an adapter with a format other than bf16, or an output inside `directory`.
        UnsupportedModelError: the format cannot represent a packed tensor, or the adapter cannot be merged. The message
            names the tensor and the reason.
        LoadError, CorruptionError: the directory or the adapter cannot be read.
        OutputExistsError: `out` exists.
        DiskError: writing failed.
    """
    if to not in TARGETS:
        raise ValueError(f"unknown format '{to}'; choose from {', '.join(TARGETS)}")
    if adapter is not None and to != "bf16":
        raise ValueError(f"an adapter can be merged only into decoded weights (bf16), not into the codes of {to}")
    refuse_existing(Path(out))
    packed = (Path(directory) / MANIFEST).is_file()
    if packed and Path(out).absolute().parent.resolve().is_relative_to(Path(directory).resolve()):
        raise ValueError(f"{out} would be inside the packed directory")
    if adapter is not None:
        return export_bf16(Path(directory), Path(out), Path(adapter))
    return TARGETS[to](Path(directory), Path(out))

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


def export(
    directory: str | PathLike[str],
    out: str | PathLike[str],
    to: str = "bf16",
    adapter: str | PathLike[str] | None = None,
) -> int:
    """Write a packed directory in another format. The tensors stream: one projection of a layer is held at a time.

    Args:
        directory: what `moepack compress` wrote.
        out: the directory (for `gguf` the file) to be made; it must not exist.
        to: "bf16", "compressed-tensors" or "gguf".
        adapter: a directory of LoRA weights that peft saved; they are merged into the decoded weights (bf16 alone).

    Returns:
        Bytes written.

    Raises:
        ValueError: there is no such format, or it takes no adapter.
        UnsupportedModelError: the format cannot hold what is packed, or the adapter cannot be merged; says which tensor
            and why.
        LoadError, CorruptionError: the directory, or the adapter, cannot be read.
        OutputExistsError: `out` exists.
        DiskError: the disk refused.
    """
    if to not in TARGETS:
        raise ValueError(f"unknown format '{to}'; there is: {', '.join(TARGETS)}")
    if adapter is not None and to != "bf16":
        raise ValueError(f"an adapter is merged into decoded weights alone (bf16); the codes of {to} stay as they are")
    refuse_existing(Path(out))
    if adapter is not None:
        return export_bf16(Path(directory), Path(out), Path(adapter))
    return TARGETS[to](Path(directory), Path(out))

"""Exports symmetric group-wise integers in the layout `pack-quantized` of compressed-tensors, which vLLM reads.

There, as in moepack, a weight is `scale * (code - 2^(bits - 1))`. The codes of a row are packed bit by bit into 32-bit
words, low bits first, and a scale belongs to a group of columns or to a row. Codes and scales are therefore copied, and
every value is exact. Offsets and groups that do not divide the row are not supported by the layout and are rejected.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moepack.errors import UnsupportedModelError
from moepack.export.directory import ModelWriter, dense_entries, tensor_entry
from moepack.export.names import experts_of
from moepack.format.directory import PackedDirectory
from moepack.format.shard import Entry
from moepack.groupwise import GroupwiseTensor

__all__ = ["export_compressed_tensors", "pack_words"]


def export_compressed_tensors(directory: Path, out: Path) -> int:
    """Write a directory in `pack-quantized`. Arguments and errors as for `export`."""
    source = PackedDirectory.open(directory)
    modules = [*_modules(source)]
    groups = _groups(source, modules)
    dense = [*dense_entries(source)]
    with ModelWriter.open(source, out, len(modules) + len(dense)) as writer:
        for packed in modules:
            writer.shard([*_entries(source, packed.name, packed.paths)])
        for entries in dense:
            writer.shard(entries)
        return writer.finish(_quantization(groups, _ignored(source)))


Scheme = tuple[int, int | None]
"""Bits and group size; None is one group per row."""


@dataclass(frozen=True)
class _Packed:
    """The modules stored in one packed tensor.

    Attributes:
        name: name of the tensor.
        paths: paths of the modules on disk.
        pattern: a path, or a regular expression for experts, that matches the modules.
        experts: path of transformers' experts module with all experts of the layer; None for a linear layer.
    """

    name: str
    paths: list[str]
    pattern: str
    experts: str | None = None


def _modules(source: PackedDirectory) -> Iterator[_Packed]:
    """Yield the modules of all packed tensors."""
    for layer in experts_of(source):
        for projection, name in layer.packed.items():
            _tensor(source, name)  # check first: only stock projections have names
            if layer.layout.stacked:
                message = "compressed-tensors needs one module per expert, but this architecture stacks the experts"
                raise UnsupportedModelError(message, file=source.path, tensor=name)
            count = source.manifest.tensors[name].shape[0]
            paths = [layer.name(projection, expert).removesuffix(".weight") for expert in range(count)]
            below = re.escape(layer.layout.template(projection).removesuffix(".weight"))
            pattern = f"{re.escape(layer.block)}\\.{below.replace(re.escape('{}'), '[0-9]+')}"
            yield _Packed(name, paths, pattern, layer.module)
    for name, record in source.manifest.packed().items():
        if not record.experts:
            path = name.removesuffix(".weight")
            yield _Packed(name, [path], path)


def _groups(source: PackedDirectory, modules: list[_Packed]) -> dict[Scheme, list[str]]:
    """Return the targets by scheme, after checking that the layout can represent them.

    The experts of a layer are one target that also matches transformers' module of all experts, because a target that
    matches nothing causes a warning.
    """
    groups: dict[Scheme, dict[str | None, list[str]]] = {}
    for packed in modules:
        tensor = _tensor(source, packed.name)
        columns, width = tensor.shape[-1], tensor.group_size
        reason = None
        if not tensor.symmetric:
            reason = "it has offsets, and pack-quantized has integer zero points"
        elif columns % width:
            reason = f"groups of {width} do not divide its {columns} columns"
        if reason:
            message = f"compressed-tensors cannot represent it: {reason}"
            raise UnsupportedModelError(message, file=source.path, tensor=packed.name)
        scheme = tensor.bits, None if width == columns else width
        groups.setdefault(scheme, {}).setdefault(packed.experts, []).append(packed.pattern)
    return {scheme: [*_targets(patterns)] for scheme, patterns in groups.items()}


def _targets(patterns: Mapping[str | None, list[str]]) -> Iterator[str]:
    """Yield the targets of a scheme, from patterns grouped by experts module."""
    for experts, found in patterns.items():
        if experts is None:
            yield from found
        else:
            yield f"re:^({'|'.join([*found, re.escape(experts)])})$"


def _tensor(source: PackedDirectory, name: str) -> GroupwiseTensor:
    record = source.manifest.tensors[name]
    if record.kind != GroupwiseTensor.kind:
        message = f"only group-wise integers can be exported to this format, not '{record.kind}'; use `--to bf16`"
        raise UnsupportedModelError(message, file=source.path, tensor=name)
    return GroupwiseTensor(source.tensor(name), file=source.path / record.file, tensor=name)


def _entries(source: PackedDirectory, name: str, paths: list[str]) -> Iterator[Entry]:
    tensor = _tensor(source, name)
    shape = tensor.shape[-2:]
    codes = tensor.decode().reshape(-1, *shape).numpy()
    scales = tensor.scales.reshape(len(codes), shape[0], -1).to(tensor.dtype)
    for path, matrix, scale in zip(paths, codes, scales, strict=True):
        yield tensor_entry(f"{path}.weight_packed", torch.from_numpy(pack_words(matrix, tensor.bits)))
        yield tensor_entry(f"{path}.weight_scale", scale)
        yield tensor_entry(f"{path}.weight_shape", torch.tensor(shape))


def pack_words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Pack codes of shape (R, C) into words of shape (R, ceil(C * bits / 32)), bit by bit, low bits first."""
    rows, columns = codes.shape
    stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little").reshape(rows, columns * bits)
    padded = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(padded, axis=-1, bitorder="little").view("<i4").reshape(rows, -1)


def _quantization(groups: dict[Scheme, list[str]], ignored: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of config.json."""
    schemes = {}
    for index, ((bits, width), targets) in enumerate(groups.items()):
        weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
        weights |= {"strategy": "channel"} if width is None else {"strategy": "group", "group_size": width}
        schemes[f"group_{index}"] = {"targets": targets, "weights": weights, "format": "pack-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": schemes,
        "ignore": ignored,
    }


def _ignored(source: PackedDirectory) -> list[str]:
    """Return the matrices that are not quantized: routers, gates, the head, linear layers that are not packed."""
    records = source.manifest.tensors.items()
    return [
        name.removesuffix(".weight")
        for name, record in records
        if not record.packed and len(record.shape) == 2 and name.endswith(".weight") and "embed" not in name
    ]

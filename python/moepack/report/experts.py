"""Reads bits, error and calibration coverage of every expert of every packed tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moepack.calibration.stage import PackedLayer, layer_tensors
from moepack.checkpoint import Checkpoint, describe
from moepack.format import PackedDirectory, TensorRecord
from moepack.format.balance import balance_of, key_of
from moepack.report.contents import ORDER

__all__ = ["TensorValues", "read_values"]


@dataclass(frozen=True)
class TensorValues:
    """Values of each expert of a packed tensor, or of the single matrix of a linear layer.

    Attributes:
        module, projection: the tensor, as in the manifest.
        experts: whether the tensor holds experts.
        bits: bits per weight, including the expert's part of all metadata.
        errors: root of squared error over squared weights, or None if unknown.
        tokens: calibration tokens of each expert, or None.
    """

    module: str
    projection: str
    experts: bool
    bits: tuple[float, ...]
    errors: tuple[float, ...] | None
    tokens: tuple[int, ...] | None


def read_values(directory: PackedDirectory, source: Checkpoint | None = None) -> list[TensorValues]:
    """Read the values of all packed tensors, in the order of computation.

    Args:
        directory: the open directory.
        source: the original checkpoint. Its weights are compared one tensor at a time (E * R * C * 4 bytes of memory).
            Without it, the errors are those that the method recorded.
    """
    records = sorted(directory.manifest.packed().items(), key=lambda item: _place(item[1]))
    measured = {} if source is None or _is_rotated(directory) else dict(_errors(directory, source))
    return [_values(directory, name, record, measured.get(name)) for name, record in records]


def _place(record: TensorRecord) -> tuple[str, int]:
    return record.file, ORDER.index(record.projection) if record.projection in ORDER else len(ORDER)


def _is_rotated(directory: PackedDirectory) -> bool:
    """Return whether the weights were rotated before packing, so that they differ from the checkpoint's."""
    return str(directory.manifest.settings.get("rotation", "none")) not in ("none", "", "None", "False")


def _values(
    directory: PackedDirectory, name: str, record: TensorRecord, measured: tuple[float, ...] | None
) -> TensorValues:
    tokens = record.details.get("tokens")
    return TensorValues(
        record.module,
        record.projection,
        record.experts,
        _bits(directory, name, record),
        measured or _noted(record),
        tuple(tokens) if isinstance(tokens, list) and record.experts else None,
    )


def _bits(directory: PackedDirectory, name: str, record: TensorRecord) -> tuple[float, ...]:
    """Return the bits per weight of each expert: the tensor's bytes, split in proportion to the experts' codes."""
    count = record.shape[0] if record.experts else 1
    weights = np.prod(record.shape) / max(count, 1)
    blob: Any = directory.blob(name)
    payloads = np.diff(blob.payloads(), axis=1).ravel() if hasattr(blob, "payloads") else np.ones(count)
    if len(payloads) != count or not payloads.sum():
        payloads = np.ones(count)
    return tuple((8 * record.nbytes * payloads / payloads.sum() / max(weights, 1)).tolist())


def _noted(record: TensorRecord) -> tuple[float, ...] | None:
    """Return the errors that the method recorded, per expert or for the whole tensor."""
    count = record.shape[0] if record.experts else 1
    errors, squared = record.details.get("errors"), record.details.get("relative_error")
    if isinstance(errors, list) and len(errors) == count:
        return tuple(map(float, errors))
    return None if squared is None else (float(squared) ** 0.5,) * count


def _errors(directory: PackedDirectory, source: Checkpoint) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Measure the errors of the tensors that exist in the checkpoint, by name."""
    model = describe(source)
    layers: tuple[PackedLayer, ...] = (*model.layers, *model.dense)
    weights = {each.name: each for layer in layers for each in layer_tensors(layer).values()}
    balance = balance_of(directory.path)
    for name, record in directory.manifest.packed().items():
        if name not in weights or weights[name].shape[-len(record.shape) :] != record.shape:
            continue
        decoded = torch.from_numpy(directory.blob(name).dequantize())
        values = balance.restored(key_of(directory.manifest, name), decoded).numpy()
        yield name, tuple(_error(weights[name].expert(i).float().numpy(), value) for i, value in enumerate(values))


def _error(original: Any, value: Any) -> float:
    energy = float(np.vdot(original, original))
    return float(np.vdot(original - value, original - value) / energy) ** 0.5 if energy else 0.0

"""Checks of a checkpoint that run before any long work, independent of the method.

Methods check the tensors that they pack; all other tensors are copied. Without these checks, a missing norm or a router
with NaN would produce an unusable packed model, and only a method that runs the model would notice, late.
"""

import math
from collections.abc import Iterable

import torch

from moepack.arrays import magnitude
from moepack.calibration.stage import Weights, layer_tensors
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import FLOATS
from moepack.checkpoint.names import check_tensors
from moepack.checkpoint.quantized import QuantizedCheckpoint
from moepack.errors import InvalidTensorError, UnsupportedModelError
from moepack.methods import Method
from moepack.methods.mixins import is_sized_by_plan
from moepack.pipeline.assignment import Assignment
from moepack.pipeline.overflow import is_half

__all__ = ["check_names", "check_source"]

GROWTH = 1.0
"""Bits per weight by which a packed tensor may exceed its quantized source, because of other scales or whole-bit
codes."""


def check_names(checkpoint: Checkpoint, model: MoeModel, assignment: Assignment) -> set[str]:
    """Check by names and shapes that the checkpoint has all tensors of its model; reads no tensor.

    Returns:
        The names of the tensors that are packed.

    Raises:
        UnsupportedModelError, CheckpointError, ValueError: as for `check_source`.
    """
    packed = [each for layer in assignment.layers(model) for each in layer_tensors(layer).values()]
    for weights in packed:
        method = assignment.of(weights)
        if 0 in weights.shape and isinstance(method, Method) and not method.packs_empty:
            message = f"has no values (shape {list(weights.shape)}), which the method {method.name} does not pack"
            raise UnsupportedModelError(message, file=checkpoint.path, tensor=weights.name)
    if isinstance(checkpoint, QuantizedCheckpoint):
        _refuse_growth(checkpoint, packed, assignment)
    check_tensors(checkpoint, [layer.name for layer in model.layers])
    return {source for weights in packed for source in weights.sources}


def check_source(checkpoint: Checkpoint, model: MoeModel, assignment: Assignment) -> dict[str, float]:
    """Check that the checkpoint has all tensors of its model, and that the copied ones, which are read, are finite.

    Tensors to pack are checked when they are packed: the layers finished before are kept until the checkpoint is
    repaired.

    Returns:
        The largest magnitude of each copied tensor that is float16 or becomes float16 when loaded.

    Raises:
        UnsupportedModelError: transformers cannot build a model from config.json, a method does not pack empty tensors,
            or the source is quantized to fewer bits than the method would produce.
        CheckpointError: a tensor is missing or does not have the model's shape.
        InvalidTensorError: a copied tensor contains NaN or infinity.
        ValueError: the assignment is inconsistent or does not fit the model.
    """
    sources = check_names(checkpoint, model, assignment)
    copied = [name for name in model.dense_names if name not in sources]
    checkpoint.gather(copied)
    largest: dict[str, float] = {}
    half = is_half(checkpoint)
    for info in map(checkpoint.info, copied):
        if info.dtype not in FLOATS:
            continue
        found = magnitude(checkpoint.tensor(info.name))
        if not math.isfinite(found):
            raise InvalidTensorError("holds NaN or infinite values", file=info.file, tensor=info.name)
        if half or info.dtype == torch.float16:
            largest[info.name] = found
    return largest


def _refuse_growth(checkpoint: QuantizedCheckpoint, packed: Iterable[Weights], assignment: Assignment) -> None:
    """Refuse to make a quantized source larger, which would gain nothing."""
    for weights in packed:
        method, stored = assignment.of(weights), checkpoint.stored_bits(set(weights.sources))
        if stored is None or not isinstance(method, Method) or is_sized_by_plan(method) or 0 in weights.shape:
            continue
        bits = 8 * method.expected(weights).nbytes / math.prod(weights.shape)
        if bits > stored + GROWTH:
            message = (
                f"the source has {stored:.2f} bits per weight ({checkpoint.method}), but the method {method.name} "
                f"would store {bits:.2f}: the output would be larger than the source, but not more accurate; "
                "request fewer bits"
            )
            raise UnsupportedModelError(message, file=checkpoint.path, tensor=weights.name)
        return  # all tensors of a source are quantized alike, so one is enough

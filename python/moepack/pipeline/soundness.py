"""What must hold of a checkpoint before hours of work on it, whatever the method.

Methods look at what they pack; the rest is copied. So a missing norm or a router of NaN would make a packed model that
nobody can use, and only a method that runs the model would notice, late.
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
from moepack.pipeline.assignment import Assignment
from moepack.pipeline.overflow import is_half

__all__ = ["check_names", "check_source"]

GROWTH = 1.0
"""Bits a weight by which a packed tensor may exceed its quantized source: other scales, or codes of whole bits."""


def check_names(checkpoint: Checkpoint, model: MoeModel, assignment: Assignment) -> set[str]:
    """Check that the checkpoint has what its model needs, by names and shapes; no tensor is read.

    Returns:
        The tensors that are packed.

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
    """Check that the checkpoint has what its model needs, and that what is copied is finite, for which it is read.

    What is packed is looked at when its turn comes: the layers before it are kept until it is mended.

    Returns:
        The largest magnitude in each tensor that is copied and is in float16, or becomes float16 when it is loaded.

    Raises:
        UnsupportedModelError: transformers cannot build a model of config.json, a method does not pack tensors without
            values, or the source is quantized to less than the method would make of it.
        CheckpointError: a tensor is missing or has another shape than the model's.
        InvalidTensorError: a tensor that is copied holds NaN or infinity.
        ValueError: the assignment contradicts itself or the model.
    """
    sources = check_names(checkpoint, model, assignment)
    copied = (name for name in model.dense_names if name not in sources)
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
    """Refuse to make codes longer that the source has short already: the size grows, and nothing is gained."""
    for weights in packed:
        method, stored = assignment.of(weights), checkpoint.stored_bits(set(weights.sources))
        if stored is None or not isinstance(method, Method) or method.plans or 0 in weights.shape:
            continue
        bits = 8 * method.expected(weights).nbytes / math.prod(weights.shape)
        if bits > stored + GROWTH:
            message = (
                f"the source has {stored:.2f} bits a weight ({checkpoint.method}), the method {method.name} would make "
                f"{bits:.2f} of them: larger, and no better; ask for fewer bits"
            )
            raise UnsupportedModelError(message, file=checkpoint.path, tensor=weights.name)
        return  # tensors of a source are quantized alike; one is enough

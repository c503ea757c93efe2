"""What must hold of a checkpoint before hours of work on it, whatever the method.

Methods look at what they pack; the rest is copied. So a missing norm or a router of NaN would make a packed model that
nobody can use, and only a method that runs the model would notice, late.
"""

import torch

from moepack.calibration.stage import layer_tensors
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import FLOATS
from moepack.checkpoint.names import check_tensors
from moepack.errors import InvalidTensorError, UnsupportedModelError
from moepack.methods import Method
from moepack.pipeline.assignment import Assignment

__all__ = ["check_source"]

_CHUNK = 1 << 24
"""Values that are looked at together."""


def check_source(checkpoint: Checkpoint, model: MoeModel, assignment: Assignment) -> None:
    """Check that the checkpoint has what its model needs, and that what is copied is finite, for which it is read.

    What is packed is looked at when its turn comes: the layers before it are kept until it is mended.

    Raises:
        UnsupportedModelError: transformers cannot build a model of config.json, or a method does not pack tensors
            without values.
        CheckpointError: a tensor is missing or has another shape than the model's.
        InvalidTensorError: a tensor that is copied holds NaN or infinity.
        ValueError: the assignment contradicts itself or the model.
    """
    packed = [each for layer in assignment.layers(model) for each in layer_tensors(layer).values()]
    for weights in packed:
        method = assignment.of(weights)
        if 0 in weights.shape and isinstance(method, Method) and not method.packs_empty:
            message = f"has no values (shape {list(weights.shape)}), which the method {method.name} does not pack"
            raise UnsupportedModelError(message, file=checkpoint.path, tensor=weights.name)
    check_tensors(checkpoint, [layer.name for layer in model.layers])
    sources = {source for weights in packed for source in weights.sources}
    for name in (name for name in model.dense_names if name not in sources):
        info = checkpoint.info(name)
        if info.dtype in FLOATS and not _is_finite(checkpoint.tensor(name)):
            raise InvalidTensorError("holds NaN or infinite values", file=info.file, tensor=name)


def _is_finite(tensor: torch.Tensor) -> bool:
    flat = tensor.reshape(-1)
    return all(bool(torch.isfinite(flat[i : i + _CHUNK]).all()) for i in range(0, len(flat), _CHUNK))

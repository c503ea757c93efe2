"""Reads source checkpoints lazily and identifies the parts of a Mixture-of-Experts model.

`Checkpoint` (see `reader`) opens a directory. `describe` identifies the expert tensors, using the descriptions in
`architectures`.
"""

from moepack.checkpoint.dense import DenseLayer, DenseLinear
from moepack.checkpoint.description import describe
from moepack.checkpoint.model import MoeLayer, MoeModel, Projection
from moepack.checkpoint.reader import Checkpoint
from moepack.format.header import TensorInfo

__all__ = ["Checkpoint", "DenseLayer", "DenseLinear", "MoeLayer", "MoeModel", "Projection", "TensorInfo", "describe"]

"""Activation-oriented outlier smoothing: one orthogonal matrix for the residual stream, folded into the weights."""

from moepack.methods.codequant.rotation.cayley import ORTHOGONAL, Learned, is_orthogonal, learn, start
from moepack.methods.codequant.rotation.fold import Folding, fold
from moepack.methods.codequant.rotation.grouping import Grouping, group_columns
from moepack.methods.codequant.rotation.states import normalized_states

__all__ = [
    "ORTHOGONAL",
    "Folding",
    "Grouping",
    "Learned",
    "fold",
    "group_columns",
    "is_orthogonal",
    "learn",
    "normalized_states",
    "start",
]

"""GPTQ for one expert, column by column in float64: the oracle of the batched solver.

It shares no code with the package: the inverse Hessian is updated by eliminating one column at a time (the formulation
of optimal brain surgeon), whereas the solver uses a triangular factor.
"""

import numpy as np


def ternary_rule(weights):
    """The paper's row grid of `weights` [R, C] (levels in bf16-exact float64); returns a column rounder."""
    low, high = np.minimum(weights.min(1), 0), np.maximum(weights.max(1), 0)

    def rounder(column, values, state):
        codes = (values > high / 2).astype(int) - (values < low / 2).astype(int)
        margin = np.minimum(np.abs(values - high / 2), np.abs(values - low / 2))
        return codes, np.where(codes > 0, high, np.where(codes < 0, low, 0.0)), margin

    return rounder


def affine_rule(bits, group, static):
    """Asymmetric groups; scale and offset are not rounded, because rounding would add ties."""
    top = 2**bits - 1
    grids = {}

    def fit(weights):
        return (weights.max(1) - weights.min(1)) / top, weights.min(1)

    def rounder(column, values, state):
        original, current, columns = state
        width = group or columns
        index = column // width
        if index not in grids:
            source = original if static or group is None else current
            grids[index] = fit(source[:, index * width : (index + 1) * width])
        scale, offset = grids[index]
        steps = (values - offset) / np.where(scale > 0, scale, 1)
        codes = np.clip(np.round(steps), 0, top)
        margin = np.abs(np.abs(steps - np.floor(steps)) - 0.5) * scale
        return codes, codes * scale + offset, margin

    return rounder


def gptq(weights, hessian, rounder, damping=0.1, act_order=False):
    """Quantize one matrix.

    Args:
        weights: [R, C] float64. hessian: [C, C] float64, positive semi-definite.
        rounder: (column, values [R], (original, current, C)) -> codes, values, distance to the nearest threshold.

    Returns:
        codes [R, C], values [R, C] and [R] the smallest distance of any weight of the row from a threshold, relative
        to the row's largest weight: rows with a tiny one may come out differently in float32.
    """
    rows, columns = weights.shape
    hessian = hessian.copy()
    dead = np.diag(hessian) == 0
    mean = np.diag(hessian)[~dead].mean()
    hessian[np.diag_indices(columns)] += damping * mean + dead * mean
    inverse = np.linalg.inv(hessian)
    order = np.argsort(-np.diag(hessian) + dead * (1 + damping) * mean, kind="stable") if act_order else range(columns)
    current, codes, values = weights.copy(), np.zeros((rows, columns)), np.zeros((rows, columns))
    margins = np.full(rows, np.inf)
    for j in order:
        codes[:, j], values[:, j], margin = rounder(j, current[:, j], (weights, current, columns))
        margins = np.minimum(margins, margin)
        error = (current[:, j] - values[:, j]) / inverse[j, j]
        current -= error[:, None] * inverse[j]
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return codes, values, margins / np.abs(weights).max(1)

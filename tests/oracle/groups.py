"""One group of weights, quantized with plain loops in float64: the oracles of the group-wise solvers.

They share no code with the package; parameters are not rounded to a stored dtype.
"""

import numpy as np


def nearest(x, scale, offset, top):
    return np.array([min(max(round((v - offset) / scale), 0), top) if scale else 0 for v in x.tolist()], float)


def hqq(x, bits, norm=0.7, beta=10.0, growth=1.01, iterations=20):
    """MiLo, equations 6-9, in zero-point form; returns the dequantized group of the least l_p error."""
    top = 2**bits - 1
    scale = (x.max() - x.min()) / top
    zero = -x.min() / scale
    best, least = None, np.inf
    for _ in range(iterations + 1):
        codes = np.clip(np.round(x / scale + zero), 0, top)
        values = scale * (codes - zero)
        error = x - values
        size = (np.abs(error) ** norm).sum()
        if size < least:
            best, least = values, size
        shrunk = np.array(
            [np.sign(e) * max(abs(e) - abs(e) ** (norm - 1) / beta, 0) if e else 0.0 for e in error.tolist()]
        )
        zero = (codes - (x - shrunk) / scale).mean()
        beta *= growth
    return best


def regression(x, codes):
    """Scale and offset of least squares for given codes, by numpy's solver."""
    design = np.stack([codes, np.ones_like(codes)], 1)
    return np.linalg.lstsq(design, x, rcond=None)[0]


def best_of_all(x, bits):
    """The least squared error that any scale and offset can reach, by trying every non-decreasing assignment.

    Nearest codes are monotone in the weights, so the optimum is among the ways to cut the sorted group.
    """
    top, ordered = 2**bits - 1, np.sort(x)
    least = np.inf

    def extend(codes):
        nonlocal least
        if len(codes) == len(ordered):
            scale, offset = regression(ordered, np.array(codes, float))
            least = min(least, ((ordered - scale * np.array(codes) - offset) ** 2).sum())
            return
        for code in range(codes[-1] if codes else 0, top + 1):
            extend([*codes, code])

    extend([])
    return least

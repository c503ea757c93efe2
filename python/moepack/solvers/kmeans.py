"""Codebooks by exact one-dimensional weighted k-means: the start of CodeQuant's clustering (CodeQuant, section 3.2).

The weights of a row are one-dimensional, so their best K centroids can be computed exactly (dynamic programming in the
Rust core), whereas SqueezeLLM and the paper's code iterate from a random start. The importance of a column is the
diagonal of the Hessian of its inputs: it weights a rounding error by its effect on the output.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moepack import _core
from moepack.errors import InvalidTensorError

__all__ = ["Codebooks", "kmeans", "nearest", "uniform"]


class Codebooks(NamedTuple):
    """Rows replaced by codes into codebooks.

    Attributes:
        codes: [..., C] uint8.
        centroids: [..., K] float32, ascending; if there are fewer distinct values, the last one is repeated.
        errors: [...] float64, weighted sums of squared errors before the centroids are rounded to float32.
    """

    codes: Tensor
    centroids: Tensor
    errors: Tensor

    def values(self) -> Tensor:
        """Return the values of the codes, [..., C] float32."""
        return torch.gather(self.centroids, -1, self.codes.long())


def kmeans(values: Tensor, clusters: int, weights: Tensor | None = None, *, name: str | None = None) -> Codebooks:
    """Find the best codebook of each row.

    Args:
        values: [..., R, C], floating point, on any device; computed in float32.
        clusters: K, 1 to 16.
        weights: [..., C], importance of each column, shared by the R rows; non-negative. All-zero weights, and None,
            mean equal importance.
        name: the tensor's name, for errors.

    Raises:
        InvalidTensorError: a value or weight is NaN or infinite, or a weight is negative.
        ValueError: shapes or the number of clusters are invalid.
    """
    if values.ndim < 2 or not values.shape[-1]:
        raise ValueError(f"values must be [..., rows, columns] with columns, not {list(values.shape)}")
    if weights is not None and weights.shape != (*values.shape[:-2], values.shape[-1]):
        raise ValueError(f"weights are {list(weights.shape)} for values {list(values.shape)}")
    flat = values.detach().reshape(-1, values.shape[-1]).to("cpu", torch.float32).contiguous()
    if not bool(flat.isfinite().all()):
        row, column = (~flat.isfinite()).nonzero()[0].tolist()
        raise InvalidTensorError(f"holds {float(flat[row, column])} in row {row}, column {column}", tensor=name)
    importance = None
    if weights is not None:
        importance = weights.detach().reshape(-1, values.shape[-1]).to("cpu", torch.float32).contiguous()
        if not bool((importance.isfinite() & (importance >= 0)).all()):
            raise InvalidTensorError("the importance of a column is negative, NaN or infinite", tensor=name)
    found = _core.kmeans(flat.numpy(), clusters, None if importance is None else importance.numpy())
    centroids, codes, errors = (torch.from_numpy(array).to(values.device) for array in found)
    rows = values.shape[:-1]
    return Codebooks(codes.view(values.shape), centroids.view(*rows, clusters), errors.view(rows))


def uniform(values: Tensor, clusters: int) -> Codebooks:
    """Round each row [..., R, C] to centroids spaced evenly from its minimum to its maximum."""
    low, high = torch.aminmax(values.float(), dim=-1, keepdim=True)
    centroids = torch.lerp(low, high, torch.linspace(0, 1, clusters, device=values.device))
    codes = nearest(values.float(), centroids)
    found = Codebooks(codes, centroids, torch.empty(0))
    return found._replace(errors=(found.values() - values.float()).double().square().sum(-1))


def nearest(values: Tensor, centroids: Tensor) -> Tensor:
    """Return codes [..., C] uint8 of the nearest ascending centroids [..., K]; ties go to the lower one.

    Of repeated centroids, only the first is used.
    """
    low, high = centroids[..., :-1], centroids[..., 1:]
    bounds = torch.where(low < high, (low + high) / 2, torch.inf)
    # The running minimum from the right: infinite bounds must not precede finite ones.
    bounds = bounds.flip(-1).cummin(-1).values.flip(-1)
    return torch.searchsorted(bounds.contiguous(), values.contiguous()).to(torch.uint8)

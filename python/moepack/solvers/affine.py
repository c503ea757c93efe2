"""Groups of columns on a uniform grid: the common interface of all group-wise solvers.

A weight is `scale * code + offset`, with a scale and an offset for each row and group of columns. Symmetric grids have
no offsets, `scale * (code - 2^(bits - 1))`, and their scales may be negative. Parameters are rounded to their stored
dtype *inside* the solvers, so that each code is the best one for the dequantized values.

Groups are independent: a solver receives a matrix of groups, one per row. `quantize_affine` reshapes any stack of
matrices into such rows in small batches, so that temporaries fit into CPU caches for any tensor size. A solver that is
also a `RowSolver` receives whole rows on a CPU instead and processes them in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from moepack.errors import InvalidTensorError

__all__ = [
    "AffineCodes",
    "Fit",
    "GroupSpec",
    "RowSolver",
    "Solver",
    "check_range",
    "quantize_affine",
    "quantize_residual",
    "round_to_nearest",
    "stored",
]

_CHUNK = {"cpu": 1 << 18}
"""Elements per solver call: a megabyte of float32 on a CPU."""
_DEVICE_CHUNK = 1 << 25
"""Elements per solver call on other devices, where small kernels are dominated by overhead."""


@dataclass(frozen=True)
class GroupSpec:
    """The grid of a tensor.

    Attributes:
        bits: bits per code, 1 to 8.
        group_size: columns that share parameters; a value of at least the number of columns means one group per row.
        symmetric: no offsets.
        storage: dtype of the stored parameters, float16 or bfloat16.
    """

    bits: int
    group_size: int
    symmetric: bool = False
    storage: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits must be 1 to 8, not {self.bits}")
        if self.group_size < 1:
            raise ValueError(f"a group must have at least one column, not {self.group_size}")
        if self.storage not in (torch.float16, torch.bfloat16):
            raise ValueError(f"parameters must be float16 or bfloat16, not {self.storage}")

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The code that represents zero on a symmetric grid."""
        return 1 << (self.bits - 1)

    def groups(self, columns: int) -> int:
        """Return the number of groups per row."""
        return -(-columns // self.group_size)


@dataclass(frozen=True)
class Fit:
    """A solver's result for groups [N, g]: codes [N, g] as floats, scales and offsets [N, 1] as stored.

    Symmetric grids have the offset `-middle * scale`, which is not stored.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor


Solver = Callable[[Tensor, GroupSpec, "Fit | None"], Fit]
"""Takes float32 groups [N, g], the grid, and initial parameters (their codes are ignored)."""


@runtime_checkable
class RowSolver(Protocol):
    """A solver with its own CPU kernel."""

    def fit_rows(
        self, rows: Tensor, spec: GroupSpec, start: tuple[Tensor, Tensor] | None, compensation: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Quantize every group of every row.

        Args:
            rows: [N, C] float32, contiguous, on the CPU.
            spec: the grid.
            start: initial scales and offsets [N, G].
            compensation: [N, C] float32, contiguous: added to the codes' values; overwritten with the residual of the
                rows.

        Returns:
            Codes [N, C] uint8, scales and offsets [N, G] float32, and the squared norms of the residuals, [N] float64.
        """


@dataclass(frozen=True)
class AffineCodes:
    """A quantized tensor.

    Attributes:
        spec: its grid.
        codes: [..., R, C] uint8.
        scales: [..., R, G] float32, representable in `spec.storage`.
        offsets: like `scales`, or None for symmetric grids.
    """

    spec: GroupSpec
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None

    def values(self) -> Tensor:
        """Return the dequantized weights [..., R, C] float32."""
        codes, columns = self.codes.float(), self.codes.shape[-1]
        if columns and columns % self.spec.group_size == 0:
            # Broadcasting avoids gathering the parameters for every weight.
            groups = codes.view(*self.scales.shape, self.spec.group_size)
            scales = self.scales[..., None]
            offsets = None if self.offsets is None else self.offsets[..., None]
        else:
            index = torch.arange(columns, device=codes.device) // self.spec.group_size
            groups, scales = codes, self.scales[..., index]
            offsets = None if self.offsets is None else self.offsets[..., index]
        if offsets is None:
            groups.sub_(self.spec.middle).mul_(scales)
        else:
            groups.mul_(scales).add_(offsets)
        return codes


def stored(values: Tensor, storage: torch.dtype) -> Tensor:
    """Round to the stored dtype, saturating at its largest finite value."""
    limit = torch.finfo(storage).max
    return values.clamp(-limit, limit).to(storage).float()


def quantize_affine(
    weight: Tensor, spec: GroupSpec, solver: Solver, *, start: AffineCodes | None = None, name: str | None = None
) -> AffineCodes:
    """Quantize a matrix or a stack of matrices group by group.

    Args:
        weight: [..., R, C], floating point, on any device. Not modified.
        spec: the grid.
        solver: finds codes and parameters of a batch of groups.
        start: initial parameters with the same shape and grid; some solvers ignore them.
        name: the tensor's name, for errors.

    Returns:
        Codes and parameters on the device of `weight`.

    Raises:
        InvalidTensorError: a weight is NaN, infinite, or out of range of the parameters' dtype, or `weight` is not a
            stack of floating-point matrices.
    """
    if not weight.is_floating_point() or weight.ndim < 2:
        raise InvalidTensorError(
            f"has shape {list(weight.shape)} and dtype {weight.dtype}, expected floating-point [..., rows, columns]",
            tensor=name,
        )
    columns = weight.shape[-1]
    rows = weight.reshape(-1, columns) if weight.numel() else weight.new_empty((0, columns))
    begin = None if start is None else _flat(start, spec.groups(columns))
    native = _native(solver, rows)
    if native is not None:
        rows = rows.float().contiguous()
        _check_rows(rows, spec.storage, name, weight.shape)
        codes, scales, offsets, _ = native.fit_rows(rows, spec, begin, None)
    else:
        codes, scales, offsets = _fit_groups(rows, spec, solver, begin, name, weight.shape)
    return _shaped(spec, codes, scales, offsets, weight.shape)


def quantize_residual(
    weight: Tensor,
    compensation: Tensor,
    spec: GroupSpec,
    solver: Solver,
    *,
    start: AffineCodes | None = None,
    name: str | None = None,
) -> tuple[AffineCodes, Tensor]:
    """Quantize the difference of matrices and their compensation.

    Args:
        weight: [E, R, C] float32, contiguous. Not modified.
        compensation: the same shape; overwritten with `weight` minus the dequantized codes.
        spec, solver, start, name: as for :func:`quantize_affine`.

    Returns:
        The codes of `weight - compensation`, and the squared norms of the remaining error, [E] float64.

    Raises:
        InvalidTensorError: as for :func:`quantize_affine`.
    """
    experts, _, columns = weight.shape
    native = _native(solver, weight)
    if native is not None:
        rows = weight.view(-1, columns)
        if start is None:
            _check_rows(rows, spec.storage, name, weight.shape)
        begin = None if start is None else _flat(start, spec.groups(columns))
        codes, scales, offsets, squares = native.fit_rows(rows, spec, begin, compensation.view(-1, columns))
        return _shaped(spec, codes, scales, offsets, weight.shape), squares.view(experts, -1).sum(1)
    found = quantize_affine(weight - compensation, spec, solver, start=start, name=name)
    torch.sub(weight, found.values(), out=compensation)
    return found, compensation.square().sum(2).double().sum(1)


def _native(solver: object, weights: Tensor) -> RowSolver | None:
    """Return the solver if it has a kernel for these weights."""
    if isinstance(solver, RowSolver) and weights.device.type == "cpu" and weights.numel():
        return solver
    return None


def _shaped(spec: GroupSpec, codes: Tensor, scales: Tensor, offsets: Tensor, shape: torch.Size) -> AffineCodes:
    cells = (*shape[:-1], spec.groups(shape[-1]))
    return AffineCodes(spec, codes.view(shape), scales.view(cells), None if spec.symmetric else offsets.view(cells))


def _fit_groups(
    rows: Tensor,
    spec: GroupSpec,
    solver: Solver,
    begin: tuple[Tensor, Tensor] | None,
    name: str | None,
    shape: torch.Size,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and offsets of rows, computed in batches."""
    codes = torch.zeros(rows.shape, dtype=torch.uint8, device=rows.device)
    scales = torch.zeros((len(rows), spec.groups(rows.shape[1])), device=rows.device)
    offsets = torch.zeros_like(scales)
    for run, part, columns_of in _runs(rows, spec.group_size):
        x = rows[run, columns_of].float()
        _check(x, spec.storage, name, (run.start, columns_of.start), shape)
        folded = x.reshape(-1, x.shape[1] // (part.stop - part.start))
        fit = solver(
            folded, spec, None if begin is None else Fit(folded, *(p[run, part].reshape(-1, 1) for p in begin))
        )
        codes[run, columns_of] = fit.codes.to(torch.uint8).view(x.shape)
        scales[run, part] = fit.scales.view(len(x), -1)
        offsets[run, part] = fit.offsets.view(len(x), -1)
    return codes, scales, offsets


def _flat(start: AffineCodes, groups: int) -> tuple[Tensor, Tensor]:
    scales = start.scales.reshape(-1, groups)
    if start.offsets is None:
        return scales, scales * -start.spec.middle
    return scales, start.offsets.reshape(-1, groups)


def _runs(rows: Tensor, group_size: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield batches of rows, groups of equal width, and their columns; a narrower last group is yielded separately."""
    columns = rows.shape[1]
    if not rows.numel():
        return
    step = max(1, _CHUNK.get(rows.device.type, _DEVICE_CHUNK) // columns)
    whole = columns // group_size
    for first in range(0, len(rows), step):
        run = slice(first, min(first + step, len(rows)))
        if whole:
            yield run, slice(0, whole), slice(0, whole * group_size)
        if whole * group_size < columns:
            yield run, slice(whole, whole + 1), slice(whole * group_size, columns)


def check_range(matrix: Tensor, storage: torch.dtype, name: str | None = None) -> None:
    """Check that parameters with dtype `storage` can represent a matrix.

    Args:
        matrix: [R, C].
        storage: the dtype.
        name: the tensor's name, for the error.

    Raises:
        InvalidTensorError: a weight is NaN, infinite or too large; names the first one.
    """
    if matrix.numel():
        _check(matrix, storage, name, (0, 0), matrix.shape)


def _check_rows(rows: Tensor, storage: torch.dtype, name: str | None, shape: torch.Size) -> None:
    """Check the range of rows without copying them; NaN fails both comparisons."""
    low, high = rows.aminmax()
    limit = torch.finfo(storage).max
    if not bool((low >= -limit) & (high <= limit)):
        _check(rows, storage, name, (0, 0), shape)


def _check(x: Tensor, storage: torch.dtype, name: str | None, first: tuple[int, int], shape: torch.Size) -> None:
    """Check the range of values; the maximum of absolute values finds NaN and infinity in one pass."""
    limit = torch.finfo(storage).max
    if bool(x.abs().amax() <= limit):
        return
    row, column = (int(i) for i in (~(x.abs() <= limit)).nonzero()[0])
    place = [*(int(i) for i in torch.unravel_index(torch.tensor(first[0] + row), shape[:-1])), first[1] + column]
    value = float(x[row, column])
    if abs(value) < float("inf"):
        raise InvalidTensorError(f"holds {value} at {place}, out of range of {storage}", tensor=name)
    raise InvalidTensorError(f"holds {value} at {place}", tensor=name)


def round_to_nearest(x: Tensor, spec: GroupSpec, start: Fit | None = None) -> Fit:
    """Map the range of each group to the ends of the grid; on symmetric grids, map the largest magnitude to one end.

    A constant group has scale zero and its value as the offset. On symmetric grids, the sign of the scale assigns the
    longer, negative side (`-2^(bits - 1)`) to the sign of the largest magnitude.
    """
    if spec.symmetric:
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        scales = stored(torch.where(-low >= high, -low, -high) / spec.middle, spec.storage)
        return assign(x, scales, scales * -spec.middle, spec)
    low = x.amin(1, keepdim=True)
    offsets = stored(low, spec.storage)
    scales = stored((x.amax(1, keepdim=True) - offsets).clamp_(min=0) / spec.top, spec.storage)
    return assign(x, scales, offsets, spec)


def assign(x: Tensor, scales: Tensor, offsets: Tensor, spec: GroupSpec) -> Fit:
    """Return the nearest codes for given parameters.

    If the scale is zero, code zero (the middle on symmetric grids).
    """
    inverse = torch.where(scales != 0, 1 / scales, 0.0)
    shift = torch.where(scales != 0, -offsets * inverse, float(spec.middle if spec.symmetric else 0))
    codes = torch.addcmul(shift, x, inverse).round_().clamp_(0, spec.top)
    return Fit(codes, scales, offsets)

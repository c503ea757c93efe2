"""Groups of columns on a uniform grid: what every group-wise solver takes and gives.

A weight is `scale * code + offset` with a scale and an offset for each row and group of columns; symmetric grids have
no offsets, `scale * (code - 2^(bits - 1))`, and their scales may be negative. Parameters are rounded to the type in
which they are stored *inside* the solvers, so that a code is always the best one for the values that a reader sees.

Groups are independent: a solver sees a matrix of groups, one a row, and nothing else. `quantize_affine` folds any stack
of matrices into such rows, a few at a time, so that temporaries stay in the caches of a CPU whatever the tensor's size.
A solver that is also a `RowSolver` gets whole rows on a CPU instead and does all of that in one pass.
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
"""Elements that a solver sees at a time: a megabyte of float32 on a CPU."""
_DEVICE_CHUNK = 1 << 25
"""Elements that a solver sees at a time on other devices, where small kernels are all overhead."""


@dataclass(frozen=True)
class GroupSpec:
    """The grid of a tensor.

    Attributes:
        bits: of a code, 1 to 8.
        group_size: columns that share parameters; at least the columns means one group a row.
        symmetric: no offsets.
        storage: type of the stored parameters, float16 or bfloat16.
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
            raise ValueError(f"parameters are float16 or bfloat16, not {self.storage}")

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The code that stands for zero on a symmetric grid."""
        return 1 << (self.bits - 1)

    def groups(self, columns: int) -> int:
        """Groups of a row."""
        return -(-columns // self.group_size)


@dataclass(frozen=True)
class Fit:
    """A solver's answer for groups [N, g]: codes [N, g] as floats, scales and offsets [N, 1] as stored.

    Symmetric grids have the offset `-middle * scale`, which is not stored.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor


Solver = Callable[[Tensor, GroupSpec, "Fit | None"], Fit]
"""Takes float32 groups [N, g], the grid, and parameters to start from (their codes are ignored)."""


@runtime_checkable
class RowSolver(Protocol):
    """A solver that has a kernel of its own on the CPU."""

    def fit_rows(
        self, rows: Tensor, spec: GroupSpec, start: tuple[Tensor, Tensor] | None, compensation: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Quantize every group of every row.

        Args:
            rows: [N, C] float32, contiguous, on the CPU.
            spec: the grid.
            start: scales and offsets [N, G] to start from.
            compensation: [N, C] float32, contiguous: what is added to the codes' values; becomes what the codes leave
                of the rows.

        Returns:
            Codes [N, C] uint8, scales and offsets [N, G] float32, and the squares of what the codes leave, [N] float64.
        """


@dataclass(frozen=True)
class AffineCodes:
    """A quantized tensor.

    Attributes:
        spec: its grid.
        codes: [..., R, C] uint8.
        scales: [..., R, G] float32, values of `spec.storage`.
        offsets: likewise, or None for symmetric grids.
    """

    spec: GroupSpec
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None

    def values(self) -> Tensor:
        """The float32 weights [..., R, C] that a reader sees."""
        codes, columns = self.codes.float(), self.codes.shape[-1]
        if columns and columns % self.spec.group_size == 0:
            # Broadcasting spares a gathered copy of the parameters for every weight.
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
    """Round to the stored type, saturating at its largest finite value."""
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
        start: parameters to start from, of the same shape and grid; solvers that take no start ignore it.
        name: the tensor's name, for errors.

    Returns:
        Codes and parameters on the device of `weight`.

    Raises:
        InvalidTensorError: a weight is NaN, infinite, or beyond the range of the parameters' type, or `weight` is no
            stack of matrices of floating-point numbers.
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
    """Quantize what a compensator leaves of matrices.

    Args:
        weight: [E, R, C] float32, contiguous. Not modified.
        compensation: the same shape; becomes what the codes leave of `weight`.
        spec, solver, start, name: as for :func:`quantize_affine`.

    Returns:
        The codes of `weight - compensation`, and the squared norms of what they leave of `weight`, [E] float64.

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
    """The solver, if it has a kernel for these weights."""
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
    """Codes, scales and offsets of rows, a run of them at a time."""
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
    """Runs of rows, each with its groups of equal width and their columns; a narrower last group comes alone."""
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
    """Refuse what parameters of type `storage` cannot express.

    Args:
        matrix: [R, C].
        storage: the type.
        name: the tensor's name, for the error.

    Raises:
        InvalidTensorError: a weight is NaN, infinite or too large; names the first.
    """
    if matrix.numel():
        _check(matrix, storage, name, (0, 0), matrix.shape)


def _check_rows(rows: Tensor, storage: torch.dtype, name: str | None, shape: torch.Size) -> None:
    """Refuse what the parameters cannot express, without a copy of the weights; NaN fails both comparisons."""
    low, high = rows.aminmax()
    limit = torch.finfo(storage).max
    if not bool((low >= -limit) & (high <= limit)):
        _check(rows, storage, name, (0, 0), shape)


def _check(x: Tensor, storage: torch.dtype, name: str | None, first: tuple[int, int], shape: torch.Size) -> None:
    """Refuse what the parameters cannot express; the sum of absolute values finds NaN and infinity in one pass."""
    limit = torch.finfo(storage).max
    if bool(x.abs().amax() <= limit):
        return
    row, column = (int(i) for i in (~(x.abs() <= limit)).nonzero()[0])
    place = [*(int(i) for i in torch.unravel_index(torch.tensor(first[0] + row), shape[:-1])), first[1] + column]
    value = float(x[row, column])
    if abs(value) < float("inf"):
        raise InvalidTensorError(f"holds {value} at {place}, beyond the range of {storage}", tensor=name)
    raise InvalidTensorError(f"holds {value} at {place}", tensor=name)


def round_to_nearest(x: Tensor, spec: GroupSpec, start: Fit | None = None) -> Fit:
    """Minimum and maximum of each group as the ends of the grid; symmetric: the largest magnitude as one end.

    A constant group has scale zero and its constant as the offset. Symmetric grids give the longer, negative side
    (`-2^(bits - 1)`) to the sign of the largest magnitude, by the sign of the scale.
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
    """The nearest codes for given parameters; code zero where the scale is zero (the middle on symmetric grids)."""
    inverse = torch.where(scales != 0, 1 / scales, 0.0)
    shift = torch.where(scales != 0, -offsets * inverse, float(spec.middle if spec.symmetric else 0))
    codes = torch.addcmul(shift, x, inverse).round_().clamp_(0, spec.top)
    return Fit(codes, scales, offsets)

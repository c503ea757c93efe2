"""GPTQ for many experts at once: one 3-D problem instead of thousands of small ones (QMoE, section 3.2).

Each row w of a weight matrix is rounded column by column. The error of a column is distributed over the remaining
columns so that the output error of the layer, (w - q) H (w - q)^T with H = X^T X, grows least. The GPTQ paper uses the
inverse of H; QuIP (Chee et al., 2023, theorem 6) shows that the factors of H itself give the same result:

    H = F diag(p)^2 F^T, F unit upper triangular;    v_k = w_k + sum of (w_j - q_j) F_jk over j < k,  q_k = round(v_k)

and the output error is the sum of (p_k (v_k - q_k))^2. With GPTQ's H^-1 = U^T U, U_kk = 1 / p_k. No matrix is inverted,
which halves the time at 3072 columns and is better conditioned.

Columns are processed in blocks of 128. Inside a block only its own columns are updated; the rest are updated once per
block by one matrix product (the lazy updates of the GPTQ paper). Blocks are split again into 16 columns for the same
reason.

Invariants: a result never holds NaN, for any Hessian; a row never depends on another row or another expert; an expert
with an unusable Hessian gets F = I, which is rounding to nearest, and its report gives the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.errors import InvalidTensorError
from moepack.solvers.grids import Grid

#: Columns updated eagerly; a power of two that keeps the inner matrix-vector products in the first-level cache, and at
#: most the columns that `cuda/columns.cu` keeps in registers.
SUB_BLOCK = 16
#: The factor by which damping grows after a failed factorization, and the last value tried. A positive semi-definite
#: matrix scaled to a mean diagonal of one is diagonally dominant long before: its largest eigenvalue is at most C.
DAMPING_GROWTH, DAMPING_LIMIT = 10.0, 1e4
#: Bytes of Hessians factorized at a time on a CPU, where several copies of them exist and large ones gain nothing from
#: batching.
FACTOR_BYTES = 64 << 20
#: Damping d bounds the condition number by C / d; beyond this bound, float32 loses the small eigenvalues.
FLOAT32_CONDITION = 1e6


@dataclass(frozen=True)
class GptqSettings:
    """Settings of the solver.

    Attributes:
        damping: added to the diagonal, relative to its mean over live columns. QMoE uses 0.1, dense GPTQ 0.01.
        block_size: columns between two lazy updates.
        act_order: process columns by decreasing diagonal of H. Group-wise grids must then be static.
    """

    damping: float = 0.1
    block_size: int = 128
    act_order: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.damping) and self.damping > 0):
            raise ValueError(f"damping must be positive and finite, not {self.damping}")
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {self.block_size}")


@dataclass(frozen=True)
class ExpertReport:
    """The outcome for one expert.

    Attributes:
        outcome: "gptq", or "rtn" if error compensation was impossible.
        reason: the reason for "rtn", otherwise ``None``.
        damping: the relative damping with which the factorization succeeded; 0 for "rtn".
        dead_columns: number of columns that no token excites. They keep their rounded weights.
        loss: the damped quadratic output error, the sum of (p_k (v_k - q_k))^2 over live columns times the mean
            diagonal of H; for "rtn" the squared error of the weights.
    """

    outcome: str
    reason: str | None
    damping: float
    dead_columns: int
    loss: float


@dataclass(frozen=True)
class GptqResult:
    """Codes [E, R, C] in the grid's dtype, their float32 values [E, R, C], and one report per expert."""

    codes: Tensor
    values: Tensor
    reports: tuple[ExpertReport, ...]


Rounder = Callable[[Grid, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Rounds the columns of a sub-block: arguments and result as for `round_columns`."""


@dataclass
class Factors:
    """The result of `factorize` for a batch of Hessians."""

    upper: Tensor  # F, [E, C, C] float32, ones on the diagonal; the identity where reasons[e] is set
    pivots: Tensor  # p, [E, C] float32; one where reasons[e] is set
    scale: list[float]  # mean diagonal that H was divided by
    damping: list[float]
    dead: Tensor  # [E, C] bool
    reasons: list[str | None]


def gptq(
    weights: Tensor,
    hessians: Tensor,
    grid: Grid,
    settings: GptqSettings | None = None,
    *,
    factors: Factors | None = None,
    rounder: Rounder | None = None,
) -> GptqResult:
    """Quantize a batch of matrices with error compensation.

    Args:
        weights: [E, R, C], any floating-point dtype, finite. Not modified.
        hessians: [E, C, C], X^T X of each expert's tokens up to a positive factor; unusable ones are handled. Not
            modified.
        grid: the allowed values. This call sets its parameters.
        settings: see :class:`GptqSettings`.
        factors: result of :func:`factorize` for the Hessians, for repeated solves; not with act-order.
        rounder: rounds the columns of a sub-block; :func:`round_columns` by default.

    Returns:
        Codes, values and reports; tensors on the device of ``weights``.

    Raises:
        InvalidTensorError: the shapes do not match, or a weight is NaN or infinite.
        ValueError: act-order with a grid whose groups follow the compensated weights.
    """
    settings = settings or GptqSettings()
    _validate(weights, hessians)
    if settings.act_order and grid.group_size is not None:
        raise ValueError("act_order requires a grid with static groups")
    if settings.act_order and factors is not None:
        raise ValueError("act_order permutes the Hessians and cannot use given factors")
    weights = weights.float()
    order = _column_order(hessians, settings.act_order)
    factors = factors or factorize(_permuted(hessians, order), settings.damping)
    grid.fit(weights)
    rounder = rounder or round_columns
    codes, values, loss = _solve(weights, factors, order, grid, settings.block_size, rounder)
    if without_compensation(factors, loss):
        # Solve everything again, because the grid must see the whole batch.
        grid.fit(weights)
        codes, values, loss = _solve(weights, factors, order, grid, settings.block_size, rounder)
    return GptqResult(codes, values, reports_of(factors, loss))


def without_compensation(factors: Factors, loss: Tensor) -> bool:
    """Reset the factors of experts whose loss [E, C] is not finite, so that they are rounded.

    Return whether there were any.

    The cause is overflow inside the compensation, which only occurs for weights near the largest float.
    """
    failed = [e for e in torch.nonzero(~torch.isfinite(loss).all(1)).flatten().tolist() if factors.reasons[e] is None]
    for e in failed:
        factors.reasons[e] = "the compensated weights overflow"
        factors.upper[e] = torch.eye(factors.upper.shape[-1], device=factors.upper.device)
        factors.pivots[e] = 1
    return bool(failed)


def reports_of(factors: Factors, loss: Tensor) -> tuple[ExpertReport, ...]:
    """Return the report of each expert for losses [E, C] in the order of the factors."""
    dead = factors.dead.sum(1).tolist()
    live = loss.masked_fill(factors.dead, 0).sum(1)
    return tuple(
        ExpertReport("gptq", None, factors.damping[e], dead[e], float(live[e]) * factors.scale[e])
        if reason is None
        else ExpertReport("rtn", reason, 0.0, dead[e], float(loss[e].sum()))
        for e, reason in enumerate(factors.reasons)
    )


def factorize(hessians: Tensor, damping: float) -> Factors:
    """Return F and p with H = F diag(p)^2 F^T for each damped Hessian [E, C, C], divided by its mean diagonal.

    With J the order reversal, J H J = L L^T gives H = (J L J)(J L J)^T: one Cholesky factorization.
    """
    experts, columns = hessians.shape[:2]
    diagonal = hessians.diagonal(dim1=1, dim2=2).double()
    dead = diagonal == 0
    scale = diagonal.sum(1) / (~dead).sum(1).clamp(min=1)
    reasons = [_unusable(hessians[e], diagonal[e], float(scale[e])) for e in range(experts)]
    upper = torch.eye(columns, device=hessians.device).repeat(experts, 1, 1)
    pivots = torch.ones((experts, columns), device=hessians.device)
    used = [0.0] * experts
    todo = [e for e in range(experts) if reasons[e] is None]
    while todo and damping <= DAMPING_LIMIT:
        solved = _attempt(hessians, scale, dead, todo, damping, (upper, pivots))
        for e in solved:
            used[e] = damping
        todo = [e for e in todo if e not in set(solved)]
        damping *= DAMPING_GROWTH
    for e in todo:
        reasons[e] = "the Hessian has no Cholesky factor under any damping"
    return Factors(upper, pivots, scale.tolist(), used, dead, reasons)


def damped(hessians: Tensor, damping: Sequence[float], reasons: Sequence[str | None]) -> Tensor:
    """Return the matrices that `factorize` found factors of, [E, C, C] float32 with a mean diagonal of 1 + damping.

    Args:
        hessians: [E, C, C]. Not modified.
        damping: the relative damping of each expert's factors.
        reasons: why an expert has no factors, or None; its matrix is the identity.
    """
    diagonal = hessians.diagonal(dim1=1, dim2=2).double()
    dead = diagonal == 0
    scale = diagonal.sum(1) / (~dead).sum(1).clamp(min=1)
    found = hessians.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None, None].float()
    found.masked_fill_(dead[:, :, None] | dead[:, None, :], 0)
    extra = torch.tensor(damping, device=found.device)[:, None] + dead
    found.diagonal(dim1=1, dim2=2).add_(extra.to(found.dtype))
    for expert, reason in enumerate(reasons):
        if reason is not None:
            found[expert] = torch.eye(found.shape[-1], device=found.device)
    return found


def _unusable(hessian: Tensor, diagonal: Tensor, scale: float) -> str | None:
    """Return why a Hessian cannot be used at all, or ``None``."""
    if not bool(_finite(hessian[None])):
        return "the Hessian is not finite"
    if bool((diagonal < 0).any()):
        return "the Hessian has a negative diagonal"
    if scale == 0:
        return "no token reached the expert"
    return None


def _attempt(
    hessians: Tensor, scale: Tensor, dead: Tensor, experts: list[int], damping: float, out: tuple[Tensor, Tensor]
) -> list[int]:
    """Factorize ``experts`` at one damping into ``out`` (F and p), first in float32 if that is precise enough.

    Returns:
        The experts that succeeded.
    """
    columns = hessians.shape[-1]
    dtypes = [torch.float64] if columns / damping > FLOAT32_CONDITION else [torch.float32, torch.float64]
    solved: list[int] = []
    for dtype in dtypes:
        for some in _portions([e for e in experts if e not in set(solved)], hessians):
            upper, pivots, held = _cholesky(hessians, some, scale, dead[some], damping, dtype)
            for position, e in enumerate(some):
                if bool(held[position]):
                    out[0][e], out[1][e] = upper[position], pivots[position]
                    solved.append(e)
    return solved


def _finite(matrices: Tensor) -> Tensor:
    """Return whether each matrix [n, C, C] is finite, [n] bool.

    NaN propagates through extremes, so no mask is needed.
    """
    if matrices.numel() == 0:
        return torch.ones(len(matrices), dtype=torch.bool, device=matrices.device)
    flat = matrices.flatten(1)  # two passes: along a dimension, aminmax is 30 times slower
    return torch.isfinite(flat.amin(1)) & torch.isfinite(flat.amax(1))


def _portions(experts: list[int], hessians: Tensor) -> Iterator[list[int]]:
    """Yield batches of experts to factorize together; on a GPU, all at once."""
    one = 4 * hessians.shape[-1] ** 2
    step = max(1, FACTOR_BYTES // max(one, 1)) if hessians.device.type == "cpu" else max(1, len(experts))
    for first in range(0, len(experts), step):
        yield experts[first : first + step]


def _cholesky(
    hessians: Tensor, some: list[int], scale: Tensor, dead: Tensor, damping: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return F [n, C, C] and p [n, C] of the Hessians `some`, and whether each is usable, [n] bool.

    Passes over the matrices take as long as the factorization, so there are few.
    """
    matrix = torch.stack([hessians[e] for e in some]) if len(some) > 1 else hessians[some[0] : some[0] + 1]
    matrix = matrix.to(dtype).flip(1, 2).div_(scale[some].to(dtype)[:, None, None])
    gone = dead.flip(1)
    if bool(gone.any()):
        # A dead column has no cross terms in a true Gram matrix; clear remainders of rounding or of the caller.
        matrix.masked_fill_(gone[:, :, None] | gone[:, None, :], 0)
    matrix.diagonal(dim1=1, dim2=2).add_(damping + gone.to(dtype))
    # LAPACK counts by columns: the transposed upper factor is the lower one by rows, and not copied.
    root, info = torch.linalg.cholesky_ex(matrix, upper=True)
    upper = root.mT.flip(1, 2)
    pivots = upper.diagonal(dim1=1, dim2=2).clone()
    upper.div_(pivots[:, None, :])
    held = (info == 0) & _finite(upper) & (pivots > 0).all(1)
    return upper, pivots, held


def round_columns(
    grid: Grid, free: Tensor, errors: Tensor, left: Tensor, upper: Tensor, columns: Tensor, pivots: Tensor
) -> tuple[Tensor, Tensor]:
    """Round the columns of a sub-block one after the other, each compensated for those before it.

    Args:
        grid: the allowed values.
        free: [E, K, R], compensated for the columns before the sub-block. Not modified.
        errors: [E, K, R], the original weights; the values are subtracted in place.
        left: [E, K, R], receives the compensated weights minus the values.
        upper: [E, K, K], the part of F.
        columns: [E, K] int64, the columns' places in the original matrix.
        pivots: [E, K], the part of p.

    Returns:
        Codes in the grid's dtype, and values, [E, K, R].
    """
    codes, values = [], []
    for j in range(free.shape[1]):
        column = free[:, j]
        if j:
            column = column + torch.bmm(upper[:, None, :j, j], errors[:, :j]).squeeze(1)
        code, value = grid.quantize(column, columns[:, j], pivots[:, j] ** 2)
        errors[:, j] -= value
        torch.sub(column, value, out=left[:, j])
        codes.append(code)
        values.append(value)
    return torch.stack(codes, 1), torch.stack(values, 1)


def _solve(
    weights: Tensor, factors: Factors, order: Tensor, grid: Grid, block: int, rounder: Rounder
) -> tuple[Tensor, Tensor, Tensor]:
    """Round all columns. Works on the transposed weights so that a column is contiguous.

    Returns:
        codes and values [E, R, C] in the original order; the sum over rows of (p_k (v_k - q_k))^2, [E, C] float64 in
        solving order.
    """
    experts, _, columns = weights.shape
    upper, pivots = factors.upper, factors.pivots
    source = _permuted_columns(weights, order).transpose(1, 2)
    work = source.contiguous()
    values = torch.empty_like(work)
    codes: Tensor | None = None
    loss = torch.zeros((experts, columns), dtype=torch.float64, device=weights.device)
    block, sub = _block_sizes(block, grid.group_size)
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        # Initially the original weights; a rounded column is replaced by its deviation from the original.
        errors = source[:, start:stop].clone(memory_format=torch.contiguous_format)
        rounding = torch.empty_like(errors)
        for left in range(start, stop, sub):
            right = min(left + sub, stop)
            if grid.group_size is not None and left % grid.group_size == 0:
                group = slice(left, left + grid.group_size)
                grid.enter(left, _current(source[:, group], work[:, group], upper[:, group, group]).transpose(1, 2))
            own, part = slice(left, right), slice(left - start, right - start)
            code, values[:, own] = rounder(
                grid, work[:, own], errors[:, part], rounding[:, part],
                upper[:, own, own], order[:, own], pivots[:, own],
            )  # fmt: skip
            if codes is None:
                codes = torch.empty(work.shape, dtype=code.dtype, device=work.device)
            codes[:, own] = code
            _spread(work[:, right:stop], upper[:, own, right:stop], errors[:, part])
        _spread(work[:, stop:], upper[:, start:stop, stop:], errors)
        loss[:, start:stop] = rounding.square_().sum(2, dtype=torch.float64) * pivots[:, start:stop].double() ** 2
    if codes is None:
        codes = torch.empty(work.shape, dtype=torch.int8, device=work.device)
    return _restored(codes, order), _restored(values, order), loss


def _current(source: Tensor, work: Tensor, upper: Tensor) -> Tensor:
    """Return the values GPTQ would hold in free columns: the weights [E, K, R] that best compensate the columns before.

    ``work`` lacks what the columns themselves pass on to each other if rounding loses nothing. With d = w - current,
    that is d_k = w_k - work_k - sum of d_j F_jk over j < k: a triangular system.
    """
    strayed: Tensor = torch.linalg.solve_triangular(upper.mT, source - work, upper=False, unitriangular=True)
    return source - strayed


def _spread(free: Tensor, upper: Tensor, errors: Tensor) -> None:
    """free [E, K, R] += upper [E, B, K]^T errors [E, B, R], in place."""
    if free.shape[1]:
        free.baddbmm_(upper.transpose(1, 2), errors)


def _block_sizes(block: int, group: int | None) -> tuple[int, int]:
    """Return block and sub-block sizes so that a group starts a sub-block and lies in one block.

    The group's weights are then current.
    """
    if group is None:
        return block, min(SUB_BLOCK, block)
    block = max(block // group, 1) * group
    return block, math.gcd(group, SUB_BLOCK)


def _column_order(hessians: Tensor, act_order: bool) -> Tensor:
    """Return the column order [E, C]: natural, or by decreasing diagonal (ties and NaN in natural order)."""
    experts, columns = hessians.shape[:2]
    if not act_order:
        return torch.arange(columns, device=hessians.device).expand(experts, columns)
    diagonal = torch.nan_to_num(hessians.diagonal(dim1=1, dim2=2).float())
    return torch.argsort(diagonal, dim=1, descending=True, stable=True)


def _natural(order: Tensor) -> bool:
    return order.stride(0) == 0


def _permuted(hessians: Tensor, order: Tensor) -> Tensor:
    if _natural(order):
        return hessians
    batch = torch.arange(order.shape[0], device=order.device)[:, None, None]
    return hessians[batch, order[:, :, None], order[:, None, :]]


def _permuted_columns(weights: Tensor, order: Tensor) -> Tensor:
    return weights if _natural(order) else weights.gather(2, order[:, None, :].expand_as(weights))


def _restored(columns_first: Tensor, order: Tensor) -> Tensor:
    """Convert [E, C, R] in solving order to [E, R, C] in the original order."""
    if not _natural(order):
        columns_first = torch.empty_like(columns_first).scatter_(
            1, order[:, :, None].expand_as(columns_first), columns_first
        )
    return columns_first.transpose(1, 2).contiguous()


def _validate(weights: Tensor, hessians: Tensor) -> None:
    if weights.dim() != 3 or not weights.is_floating_point():
        raise InvalidTensorError(f"weights must be floating [E, R, C], not {weights.dtype} {list(weights.shape)}")
    expected = (weights.shape[0], weights.shape[2], weights.shape[2])
    if tuple(hessians.shape) != expected or not hessians.is_floating_point():
        raise InvalidTensorError(
            f"hessians must be floating {list(expected)}, not {hessians.dtype} {list(hessians.shape)}"
        )
    if not bool(torch.isfinite(weights).all()):
        raise InvalidTensorError("weights hold NaN or infinite values")

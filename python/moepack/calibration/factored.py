"""Gradients of weights as factors: what products read, and the gradients of their outputs.

The gradient of a matrix in a product of n rows has rank n at most. A window's rows of an expert are few, so sums of its
squares cost less from the two factors than from the gradient itself, which is as large as the matrix
(`moepack.calibration.squares`).

While a `Gradients` is active, products with watched parameters (linear layers, experts one by one or grouped, and
look-ups of rows) keep their factors, and autograd does not compute the gradient of the weights. Whatever else reads a
watched parameter is left to autograd. If one parameter has both within a window, they are added up, because squares of
parts are not the square of the whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from moepack.solvers.products import product

__all__ = ["Gradients", "Watch"]


class Watch(Protocol):
    """Receives the gradients of a window by parameter."""

    def wants(self, name: str) -> bool:
        """Return whether the gradient of a parameter is needed."""

    def gradient(self, name: str, gradient: Tensor) -> None:
        """Receive the gradient of a parameter."""

    def factors(self, name: str, matrix: int, left: Tensor, right: Tensor) -> None:
        """Receive a matrix's gradient as factors, [n, A] and [n, B]; it is left^T right.

        A parameter [E, A, B] has E matrices, and [A, B] one.
        """

    def stack(self, name: str, left: Tensor, right: Tensor) -> None:
        """Receive the gradients of all matrices of a parameter [E, A, B] as factors, [E, n, A] and [E, n, B]."""

    def rows(self, name: str, rows: Tensor, gradients: Tensor) -> None:
        """Receive the gradients [n, B] of different rows [n] of a parameter [A, B]; the others are zero."""

    def observe(self, name: str, module: nn.Module) -> AbstractContextManager[None]:
        """Observe calls of a module at an end of the model, whose loaded weights are the parameter `name`."""


@dataclass(frozen=True)
class _Matrix:
    """A matrix of a watched parameter, as a product reads it.

    Attributes:
        name: name of the parameter.
        index: its index in the parameter.
        turned: whether the parameter stores it with its inputs first.
    """

    name: str
    index: int
    turned: bool


@dataclass
class _Window:
    """What one window left of a parameter.

    Attributes:
        pairs: by matrix, its factors.
        stacks: factors of all matrices.
        rows: rows that were looked up [n], and their gradients [n, B].
    """

    pairs: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    stacks: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def kinds(self) -> int:
        """The number of forms in which parts of the gradient are given."""
        return bool(self.pairs) + bool(self.stacks) + bool(self.rows)


class Gradients(TorchFunctionMode):
    """Passes on the gradients of each window; active while a window passes forward.

    Args:
        watch: receives the gradients.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._known: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
        self._windows: dict[str, _Window] = {}
        self._handlers: Mapping[Any, Callable[..., Tensor | None]] = _handlers(self)

    def watch(self, name: str, parameter: nn.Parameter) -> None:
        """Watch a loaded parameter until it is dropped."""
        hooked: Any = parameter.requires_grad_(True)
        hooked.register_post_accumulate_grad_hook(lambda found: self._computed(name, found))
        self._known = {key: known for key, known in self._known.items() if known[0]() is not None}
        self._known[id(parameter)] = weakref.ref(parameter), name

    @torch.no_grad()
    def finish(self) -> None:
        """Pass on the factors of a window after its backward pass."""
        windows, self._windows = self._windows, {}
        parameters = {name: parameter for ref, name in self._known.values() if (parameter := ref()) is not None}
        for name, window in windows.items():
            parameter = parameters[name]
            if parameter.grad is not None or window.kinds > 1:
                self._watch.gradient(name, _whole(parameter, window))
                parameter.grad = None
                continue
            if window.rows:
                self._watch.rows(name, *_summed(window.rows))
            if window.stacks:
                self._watch.stack(name, *_joined(window.stacks))
            for matrix, pairs in window.pairs.items():
                self._watch.factors(name, matrix, *_joined(pairs))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch; a product with a watched parameter keeps its factors."""
        handler = self._handlers.get(func) if torch.is_grad_enabled() else None
        found = None if handler is None else handler(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found

    def keep(self, matrix: _Matrix, inputs: Tensor, gradients: Tensor) -> None:
        """Keep the factors of a product: its inputs [n, C], and the gradients of its outputs [n, R]."""
        pair = (inputs, gradients) if matrix.turned else (gradients, inputs)
        self._windows.setdefault(matrix.name, _Window()).pairs.setdefault(matrix.index, []).append(pair)

    def keep_stack(self, name: str, turned: bool, inputs: Tensor, gradients: Tensor) -> None:
        """Keep the factors of the products of all matrices: inputs [E, n, C], and gradients of outputs [E, n, R]."""
        pair = (inputs, gradients) if turned else (gradients, inputs)
        self._windows.setdefault(name, _Window()).stacks.append(pair)

    def keep_rows(self, name: str, rows: Tensor, gradients: Tensor) -> None:
        """Keep the gradients [n, B] of looked-up rows [n]."""
        self._windows.setdefault(name, _Window()).rows.append((rows, gradients))

    def expect(self, name: str) -> None:
        """Note that factors of a parameter will be kept, so that autograd's part of its gradient waits for them."""
        self._windows.setdefault(name, _Window())

    def name_of(self, tensor: Any) -> str | None:
        """Return the name of a watched parameter; None for any other object."""
        ref, name = self._known.get(id(tensor), (None, ""))
        return name if ref is not None and ref() is tensor else None

    def matrix(self, weight: Tensor) -> _Matrix | None:
        """Return the matrix of a watched parameter that a tensor [R, C] is; `turned` if it is stored as [C, R]."""
        base = weight if weight._base is None else weight._base
        name = self.name_of(base)
        if name is None or weight.dim() != 2 or base.dim() not in (2, 3) or not base.is_contiguous():
            return None
        size = base.shape[-2] * base.shape[-1]
        index, rest = divmod(int(weight.storage_offset()) - int(base.storage_offset()), max(size, 1))
        for turned, shape in ((False, base.shape[-2:]), (True, base.shape[-2:][::-1])):
            strides = (1, shape[0]) if turned else (shape[1], 1)
            if not rest and weight.shape == shape and weight.stride() == strides:
                return _Matrix(name, index, turned)
        return None

    def stacked(self, weight: Tensor) -> tuple[str, bool] | None:
        """Return the name of the watched parameter [E, C, R] or [E, R, C] (True) that a tensor [E, C, R] is."""
        base = weight if weight._base is None else weight._base
        name = self.name_of(base)
        if name is None or weight.dim() != 3 or base.dim() != 3 or not base.is_contiguous():
            return None
        for turned, like in ((True, base), (False, base.mT)):
            if weight.shape == like.shape and weight.stride() == like.stride():
                return name, turned
        return None

    def _computed(self, name: str, parameter: Any) -> None:
        """Pass on autograd's gradient of a parameter, unless factors are to be added to it, or there is none."""
        if parameter.grad is not None and name not in self._windows:
            gradient, parameter.grad = parameter.grad, None
            self._watch.gradient(name, gradient)


def _handlers(gradients: Gradients) -> dict[Any, Callable[..., Tensor | None]]:
    """Return the functions of torch that keep factors; each handler returns None where it does not apply."""

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        matrix = gradients.matrix(weight)
        if matrix is None:
            return None
        gradients.expect(matrix.name)
        found: Tensor = _Product.apply(input.reshape(-1, input.shape[-1]), weight, gradients, matrix)
        found = found.view(*input.shape[:-1], len(weight))
        return found if bias is None else found + bias

    def matmul(x: Any = None, weight: Any = None, **others: Any) -> Tensor | None:
        # Operands have several keywords, which transformers does not use.
        if others or not isinstance(weight, Tensor) or weight.dim() != 2 or not isinstance(x, Tensor) or x.dim() < 2:
            return None
        return linear(x, weight.mT)

    def grouped(x: Any = None, weight: Any = None, *, offs: Tensor | None = None, **others: Any) -> Tensor | None:
        if weight is None or any(value is not None for value in others.values()):
            return None
        known = gradients.stacked(weight)
        if known is None or offs is None or x.dim() != 2:
            return None
        gradients.expect(known[0])
        products = _Grouped if _are_apart(x) else _Stacked
        found: Tensor = products.apply(x, weight, offs, gradients, *known)
        return found

    def embedding(
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor | None:
        name = gradients.name_of(weight)
        if name is None or max_norm is not None or scale_grad_by_freq or sparse:
            return None
        gradients.expect(name)
        found: Tensor = _LookUp.apply(input, weight, padding_idx, gradients, name)
        return found

    found: dict[Any, Callable[..., Tensor | None]] = {functional.linear: linear, functional.embedding: embedding}
    found |= dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), matmul)
    if hasattr(torch, "_grouped_mm"):
        found[torch._grouped_mm] = grouped  # which `functional.grouped_mm` calls
    return found


class _Product(torch.autograd.Function):
    """x W^T for rows x [n, C] and a matrix W [R, C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradients: Gradients, matrix: _Matrix) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.receivers = gradients, matrix
        found = product(x, weight)
        return found if found._base is None else found.clone()  # the output may not be a view

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (gradients, matrix) = ctx.saved_tensors, ctx.receivers
        gradients.keep(matrix, x.detach(), given[0])
        passed = product(given[0], weight.mT) if ctx.needs_input_grad[0] else None
        return passed, None, None, None


def _are_apart(x: Tensor) -> bool:
    """Return whether the products of rows x [n, C] with many matrices run one by one: on a CPU, or if n is 0."""
    return x.device.type == "cpu" or not len(x)


class _Grouped(torch.autograd.Function):
    """Products of consecutive rows x [n, C] with one of the matrices [E, C, R] each."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, gradients: Gradients, name: str, turned: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.receivers, ctx.ends = (gradients, name, turned), ends.tolist()
        found = x.new_zeros(len(x), weight.shape[2])
        for index, (first, last) in enumerate(zip([0, *ctx.ends], ctx.ends, strict=False)):
            found[first:last] = product(x[first:last], weight[index].mT)
        return found

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (gradients, name, turned) = ctx.saved_tensors, ctx.receivers
        passed = torch.zeros_like(x)
        for index, (first, last) in enumerate(zip([0, *ctx.ends], ctx.ends, strict=False)):
            if first < last:
                rows = given[0][first:last]
                gradients.keep(_Matrix(name, index, turned), x[first:last].detach(), rows)
                passed[first:last] = product(rows, weight[index])
        return passed, None, None, None, None, None


class _Stacked(torch.autograd.Function):
    """The products of `_Grouped` as one batch, in which zeros fill up the rows of each matrix to the largest number.

    A GPU computes a batch in less time than the host needs to launch the products of small matrices one by one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, gradients: Gradients, name: str, turned: bool
    ) -> Tensor:
        ctx.places, ctx.receivers = _Places.of(ends, len(x)), (gradients, name, turned)
        stacked = ctx.places.stacked(x)
        ctx.save_for_backward(stacked, weight)
        found: Tensor = ctx.places.flat(torch.bmm(stacked, weight))
        return found

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (gradients, name, turned) = ctx.saved_tensors, ctx.receivers
        stacked = ctx.places.stacked(given[0])
        gradients.keep_stack(name, turned, x, stacked)
        return ctx.places.flat(torch.bmm(stacked, weight.mT)), None, None, None, None, None


@dataclass(frozen=True)
class _Places:
    """Places of n rows in a stack [E, m, ...], which has room for m rows of each of E matrices.

    Attributes:
        rows: [E, m], the row of each place; any row where there is none.
        used: [E, m, 1], whether there is one.
        matrices, positions: [n], the place of each row.
        assigned: [n, 1], whether a row belongs to a matrix: rows after the last end belong to none.
    """

    rows: Tensor
    used: Tensor
    matrices: Tensor
    positions: Tensor
    assigned: Tensor

    @classmethod
    def of(cls, ends: Tensor, count: int) -> _Places:
        """Return the places of `count` rows, at least one, for the ends [E] of the matrices' rows."""
        ends = ends.long()
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        inside = torch.arange(max(int((ends - starts).max()), 1), device=ends.device)
        rows, every = starts[:, None] + inside, torch.arange(count, device=ends.device)
        matrices = torch.searchsorted(ends, every, right=True)
        assigned = matrices < len(ends)
        matrices = torch.where(assigned, matrices, 0)
        positions = torch.where(assigned, every - starts[matrices], 0)
        return cls(rows.clamp(max=count - 1), (rows < ends[:, None])[..., None], matrices, positions, assigned[:, None])

    def stacked(self, values: Tensor) -> Tensor:
        """Return rows [n, A] as [E, m, A], filled up with zeros."""
        found: Tensor = torch.where(self.used, values[self.rows], 0)
        return found

    def flat(self, stacked: Tensor) -> Tensor:
        """Return the rows [n, A] of a stack [E, m, A]; zeros for rows without a matrix."""
        found: Tensor = torch.where(self.assigned, stacked[self.matrices, self.positions], 0)
        return found


class _LookUp(torch.autograd.Function):
    """Rows of a matrix [A, B] by their indices."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None, gradients: Gradients, name: str) -> Tensor:
        ctx.receivers = gradients, name, ids.flatten(), padding
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[None, ...]:
        gradients, name, ids, padding = ctx.receivers
        rows = given[0].reshape(len(ids), -1)
        if padding is not None:
            kept = ids != padding
            ids, rows = ids[kept], rows[kept]
        gradients.keep_rows(name, ids, rows)
        return None, None, None, None, None


def _whole(parameter: nn.Parameter, window: _Window) -> Tensor:
    """Return the gradient of a parameter from all of its parts."""
    found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
    matrices = found.view(-1, *found.shape[-2:])
    for index, pairs in window.pairs.items():
        for left, right in pairs:
            matrices[index].addmm_(left.mT, right)
    for left, right in window.stacks:
        matrices.baddbmm_(left.mT, right)
    for rows, gradients in window.rows:
        matrices[0].index_add_(0, rows, gradients)
    return found


def _joined(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the factors [..., n, A] and [..., n, B] of a sum of products of factors."""
    left, right = (torch.cat(parts, -2) if len(parts) > 1 else parts[0] for parts in zip(*pairs, strict=True))
    return left, right


def _summed(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return different rows [n] and the sums of their gradients [n, B]."""
    rows, gradients = (torch.cat(each) for each in zip(*parts, strict=True))
    different, places = torch.unique(rows, return_inverse=True)
    return different, gradients.new_zeros(len(different), gradients.shape[1]).index_add_(0, places, gradients)

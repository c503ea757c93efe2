"""Operations of a decoding step in one launch each of `cuda/step.cu`: RMS norms, in place of the eight launches of
transformers' modules, rotary embeddings, in place of twelve, and the preparation of heads.

A norm or rotation is replaced if a trial on random rows shows that the kernel computes the same function.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moepack.backends.gpu.program import Program
from moepack.backends.gpu.rooms import NO_ROOMS, ROOMS, Rooms
from moepack.backends.gpu.structs import ACTIVATIONS, TYPES, Struct, StructValue, activations
from moepack.hooks import has_own_forward

__all__ = [
    "HeadRows", "Norm", "Place", "add_norm", "norm_of", "norms", "prepare_heads", "prepare_heads_in_rooms", "program",
    "replaced", "rms_norm", "rotations", "supports_heads",
]  # fmt: skip

_THREADS = 256
_EIGHT = 8
"""Columns per thread; rows are multiples of them."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_EPSILONS = ("variance_epsilon", "eps")
"""The names that modules use."""

_SAME = 0.99
"""The least share of equal values. Sums in another order change the others by one unit in the last place."""


class Norm(NamedTuple):
    """An RMS norm.

    Attributes:
        weight: [C].
        epsilon: added to the mean of squares.
        late: whether normalized values are only rounded after they were multiplied by the weight.
    """

    weight: Tensor
    epsilon: float
    late: bool = False


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, late: bool = False) -> Tensor:
    """Normalize x [..., C], with a `Norm` of the same dtype on the same GPU."""
    rows = x.contiguous().view(-1, x.shape[-1])
    out = torch.empty_like(rows)
    threads = min(_THREADS, -(-rows.shape[1] // (32 * _EIGHT)) * 32)
    program().launch(
        "rms_norm", len(rows), threads, [activations(rows), activations(weight[None]), epsilon, int(late), out],
        early=True,
    )  # fmt: skip
    return out.view(x.shape)


def add_norm(x: Tensor, addend: Tensor, weight: Tensor, epsilon: float, late: bool = False) -> tuple[Tensor, Tensor]:
    """Return x + addend, rounded, and its norm.

    Args:
        x: [T, C], bfloat16, float16 or float32; C is a multiple of 8 and at most 16,384.
        addend: [T, C], rounded to the dtype of x first.
        weight, epsilon, late: a `Norm` in the dtype of x.
    """
    x, addend = x.contiguous(), addend.contiguous()
    out = torch.empty_like(x), torch.empty_like(x)
    threads = min(4 * _THREADS, -(-x.shape[1] // (32 * _EIGHT)) * 32)
    rows = (activations(each) for each in (x, addend, weight[None]))
    program().launch("add_norm", len(x), threads, [*rows, epsilon, int(late), *out], early=True)
    return out


class HeadRows(NamedTuple):
    """Queries, keys and values of one token per sequence, as rows of a product [B, rows of heads, D].

    Attributes:
        queries, keys, values: [B, heads, D], with any stride between sequences that is a multiple of D.
        query_norm, key_norm: weights [D] of the heads' RMS norms, or None.
        epsilon: of the norms.
        cos, sin: [B, R], which rotate the first R columns; R is a multiple of 16.
        folded: whether they rotate 2 R columns instead, with the same R values for both halves.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    epsilon: float
    cos: Tensor
    sin: Tensor
    folded: bool = False

    @property
    def rotated(self) -> int:
        """The number of columns that are rotated."""
        return self.cos.shape[-1] * (2 if self.folded else 1)


_HEADS = Struct("step.cu", "Heads", Activations=ACTIVATIONS, Rooms=ROOMS)
_HEAD_THREADS = 128
_MOST_WIDTH = 256


def supports_heads(width: int, rotated: int) -> bool:
    """Whether `prepare_heads` supports heads of a width, with their first columns rotated."""
    return not width % _EIGHT and width <= _MOST_WIDTH and not rotated % (2 * _EIGHT) and rotated <= width


def prepare_heads(heads: HeadRows, place: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Normalize and rotate heads; append keys and values to buffers.

    Args:
        heads: the heads, all of one dtype.
        place: [1] int64, the token of the buffers that is written.
        keys, values: buffers [B, groups, capacity, D].

    Returns:
        The queries [B, heads, D].
    """
    groups, capacity = keys.shape[1:3]
    held = {"place": place, "keys_out": keys, "values_out": values, "capacity": capacity, "rooms": ROOMS(**NO_ROOMS)}
    return _prepared(heads, groups, held)


def prepare_heads_in_rooms(heads: HeadRows, rooms: Rooms) -> Tensor:
    """Normalize and rotate heads [R, heads, D] of tokens; write keys and values to rooms; return the queries."""
    held = {"place": None, "keys_out": None, "values_out": None, "capacity": 0, "rooms": rooms.struct()}
    return _prepared(heads, heads.keys.shape[1], held)


def _prepared(heads: HeadRows, groups: int, held: dict[str, Any]) -> Tensor:
    """Launch with the members that say where keys and values are written."""
    batch, count, width = heads.queries.shape
    queries = heads.queries.new_empty((batch, count, width))
    strides = {
        f"{name}_stride": rows.stride(0) // width
        for name, rows in zip(("query", "key", "value"), heads[:3], strict=True)
    }
    argument = _HEADS(
        queries=_rows(heads.queries), keys=_rows(heads.keys), values=_rows(heads.values),
        query_norm=_rows(heads.query_norm), key_norm=_rows(heads.key_norm),
        cos=_rows(heads.cos.contiguous()), sin=_rows(heads.sin.contiguous()), queries_out=queries,
        epsilon=heads.epsilon, query_heads=count, key_heads=groups, rotated=heads.rotated, **strides, **held,
    )  # fmt: skip
    rows = batch * (count + 2 * groups)
    program().launch("prepare_heads", -(-rows * 32 // _HEAD_THREADS), _HEAD_THREADS, [argument, rows], early=True)
    return queries


def _rows(x: Tensor | None) -> StructValue:
    """Rows of any tensor's last dimension."""
    return (
        ACTIVATIONS(data=None, type=0, columns=0)
        if x is None
        else ACTIVATIONS(data=x, type=TYPES[x.dtype], columns=x.shape[-1])
    )


@cache
def program() -> Program:
    """The kernels."""
    return Program("step.cu")


def rotated(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    """Rotate queries [B, heads, T, D] and keys by cos and sin [B, T, D]; None if the kernel does not support them."""
    tensors = queries, keys, cos, sin
    if torch.is_grad_enabled() or not queries.is_cuda or len({(each.dtype, each.device) for each in tensors}) > 1:
        return None
    if queries.dtype not in _DTYPES or not queries.ndim == keys.ndim == 4 or not cos.ndim == sin.ndim == 3:
        return None
    (batch, heads, tokens, width), rows = queries.shape, queries.shape[0] * queries.shape[2]
    if cos.shape != sin.shape or cos.shape != (batch, tokens, width) or width % (2 * _EIGHT):
        return None
    if keys.shape != (batch, keys.shape[1], tokens, width) or not rows:
        return None
    own = [each.transpose(1, 2).contiguous() for each in (queries, keys)]
    out = [torch.empty_like(each) for each in own]
    items = rows * (heads + keys.shape[1]) * width // _EIGHT
    program().launch(
        "rotate", -(-items // _THREADS), _THREADS,
        [
            *(activations(each.view(-1, width)) for each in own),
            *(activations(each.contiguous().view(-1, width)) for each in (cos, sin)),
            rows, heads, keys.shape[1], *out,
        ],
        early=True,
    )  # fmt: skip
    return out[0].transpose(1, 2), out[1].transpose(1, 2)


Place = tuple[MutableMapping[str, Any], str, Any]
"""A namespace, a name in it, and the value that it gets."""


@contextmanager
def replaced(places: Iterable[Place]) -> Iterator[int]:
    """Set values in namespaces within the context, and restore them afterwards; gives their number."""
    with ExitStack() as stack:
        count = 0
        for namespace, name, value in places:
            if name in namespace:
                stack.callback(namespace.__setitem__, name, namespace[name])
            else:
                stack.callback(namespace.pop, name, None)
            namespace[name] = value
            count += 1
        yield count


_ROTATION = "apply_rotary_pos_emb"
"""The function of transformers' models that rotates queries and keys."""


def rotations(model: nn.Module) -> list[Place]:
    """Replacements of the functions that rotate a model's queries and keys on a GPU.

    They are functions of modules that other threads may use: those calls give the same results.
    """
    places = {type(module).__module__: vars(sys.modules[type(module).__module__]) for module in model.modules()}
    first = next(model.parameters(), None)
    if first is None or not first.is_cuda or first.dtype not in _DTYPES:
        return []
    found = [(names, names[_ROTATION]) for names in places.values() if _ROTATION in names]
    return [(names, _ROTATION, _with_rotation(own)) for names, own in found if _is_rotation(own, first)]


def _with_rotation(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function that uses the kernel if it supports the arguments."""

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **named: Any) -> Any:
        done = None if args or named else rotated(q, k, cos, sin)
        return own(q, k, cos, sin, *args, **named) if done is None else done

    return apply


def _is_rotation(own: Callable[..., Any], like: Tensor | None) -> bool:
    """Whether a function computes what the kernel does."""
    assert like is not None
    generator = torch.Generator(like.device).manual_seed(0)
    shapes = (2, 3, 1, 64), (2, 2, 1, 64), (2, 1, 64), (2, 1, 64)
    given = [torch.randn(shape, generator=generator, device=like.device).to(like.dtype) for shape in shapes]
    with torch.no_grad(), torch.cuda.device(like.device):
        found = rotated(*given)
        try:
            expected = own(*given)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
    if found is None or not (isinstance(expected, tuple) and len(expected) == 2):
        return False
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def norms(model: nn.Module) -> list[Place]:
    """Replacements of the forwards of a model's RMS norms on GPUs; the GPU of the inputs must be the current one."""
    found = [(module, norm) for module in model.modules() if (norm := norm_of(module)) is not None]
    return [(vars(module), "forward", _with_norm(module.forward, *norm)) for module, norm in found]


def norm_of(module: nn.Module) -> Norm | None:
    """The RMS norm of a module on a GPU that computes what the kernel does; None for other modules."""
    epsilon = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    weight = getattr(module, "weight", None)
    if not isinstance(epsilon, float) or not has_own_forward(module) or not isinstance(weight, Tensor):
        return None
    norms = (Norm(weight, epsilon, late) for late in (False, True))
    return next((norm for norm in norms if _computes(module, norm)), None)


def _with_norm(own: Callable[..., Any], weight: Tensor, epsilon: float, late: bool) -> Callable[..., Any]:
    """A forward that uses the kernel if it supports the arguments."""

    def forward(x: Tensor, *args: Any, **named: Any) -> Any:
        plain = not (args or named or torch.is_grad_enabled()) and x.dtype is weight.dtype and x.numel() > 0
        plain = plain and x.shape[-1:] == weight.shape
        return rms_norm(x, weight, epsilon, late) if plain else own(x, *args, **named)

    return forward


def _computes(module: nn.Module, norm: Norm) -> bool:
    """Whether a module computes what the kernel does, for rows with large and small values."""
    weight = norm.weight
    if not (weight.is_cuda and weight.ndim == 1 and weight.dtype in _DTYPES):
        return False
    if len(weight) % _EIGHT or len(list(module.parameters())) != 1 or len(list(module.modules())) != 1:
        return False
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(2, len(weight), generator=generator, device=weight.device)
    x = (x * torch.tensor([[3.0], [norm.epsilon**0.5]], device=weight.device)).to(weight.dtype)
    with torch.no_grad(), torch.cuda.device(weight.device):
        try:
            own = module(x)
        except (RuntimeError, TypeError, ValueError):
            return False
        if not isinstance(own, Tensor) or own.shape != x.shape or own.dtype != x.dtype:
            return False
        found = rms_norm(x, *norm)
        close = torch.isclose(found, own, rtol=2 * torch.finfo(x.dtype).eps, atol=0)
        # Float32 has no second rounding that would make values equal.
        same = close if x.dtype is torch.float32 else found == own
        return bool(close.all()) and float(same.float().mean()) >= _SAME

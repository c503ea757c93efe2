"""The loss of a decoder and its gradients, block by block: forward through all blocks, then back, last block first.

The forward pass keeps what enters each block. On the way back a block is loaded again with its experts, computes its
outputs once more, window by window, and turns the gradient of its outputs into those of its parameters and inputs. So
the checkpoint is read twice, and in memory are, whatever the size of the model: one block in float32, one window's
gradient of one of its parameters or a few, and what entered each block, N * L * W * 4 bytes each.

What blocks hand on beside hidden states is followed, too: what the block before returned (`Carried`), what earlier
blocks left in a mapping (`Shared`), and arguments that the embedding's module computes from weights.

A parameter that both the embedding's module and the tail use (a tied head) gets the sum of both gradients within a
window: the tail runs once more beside the embedding, so the gradients of one window meet and none is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moepack.calibration.arguments import mapped, tensors
from moepack.calibration.buffer import ListBuffer
from moepack.calibration.skeleton import Skeleton
from moepack.calibration.stacks import Stack
from moepack.calibration.stream import Stream
from moepack.calibration.tail import Tail
from moepack.errors import UnsupportedModelError
from moepack.runtime.finite import are_finite

__all__ = ["Backward", "Passed", "Watch"]

FORWARD, BACKWARD = 1, 3
"""Passes over weights that a window takes: one forward, three on the way back (outputs, and two kinds of gradients)."""

PROBED = 4
"""Tokens with which it is found out what logits depend on."""

Roots = Iterable[tuple[Tensor, Tensor | None]]
"""Tensors and the gradient of the loss with respect to each of them."""


class Watch(Protocol):
    """What looks at gradients."""

    def wants(self, name: str) -> bool:
        """Whether it wants the gradient of a parameter."""

    def watch(self, name: str, parameter: nn.Parameter) -> None:
        """Take the gradients of a parameter of this name, one a window, as long as it is loaded."""


Passed = Callable[[str, int], None]
"""Told where the pass is (a block's path, "head" or "embedding") and how many weights a window has passed there."""


@dataclass
class _Entered:
    """What entered a block, of one window: hidden states [1, L, W], and what blocks before it handed on."""

    hidden: Tensor
    carried: Any
    shared: Any


@dataclass
class _Window:
    """What is known of a window on the way back.

    Attributes:
        states: [1, L, W], what the last block gave; kept where the tail runs again.
        drawn: [L] the tokens that were drawn.
        hidden: [1, L, W], gradient of the hidden states between two blocks; written in place.
        handed: gradients of what is handed on there beside them; empty behind the last block.
        arguments: by block, gradients of its arguments that depend on weights.
    """

    hidden: Tensor
    drawn: Tensor
    states: Tensor | None
    handed: list[Tensor | None] = field(default_factory=list)
    arguments: dict[int, list[Tensor | None]] = field(default_factory=dict)


class Backward:
    """One pass over windows of text.

    Args:
        skeleton: of the model, with its experts.
        stack: its blocks, with batches of one window.
        ids: [N, L] tokens.
        watch: what looks at gradients.

    Raises:
        UnsupportedModelError: blocks share a parameter, whose gradient would be complete behind the last of them.
    """

    def __init__(self, skeleton: Skeleton, stack: Stack, ids: Tensor, watch: Watch) -> None:
        assert stack.batch == 1, "gradients are told apart by window"
        self._skeleton, self._stack, self._ids, self._watch = skeleton, stack, ids, watch
        self._passed: Passed = lambda path, weights: None
        self._refuse_shared()
        self._tail = Tail(skeleton, stack)
        self._joint = False
        self._dependent: list[list[bool]] = []
        self._entered: list[list[_Entered]] = []

    @property
    def work(self) -> int:
        """The sum of all weights that `passed` will be told of."""
        blocks = (FORWARD + BACKWARD) * sum(map(self._weights, self._stack.blocks))
        return len(self._ids) * (blocks + BACKWARD * (self._head_weights + self._weights(self._stack.name)))

    def run(self, generator: torch.Generator, passed: Passed) -> None:
        """Show the gradients of the summed loss of each window, whose targets are drawn from the model's predictions.

        Args:
            generator: what they are drawn with, on the CPU.
            passed: told of the progress.

        Raises:
            CalibrationError: a block computes NaN or infinity; names it.
            NonFiniteError: the tail does.
            UnsupportedModelError: blocks read more than the block before them gives.
        """
        self._passed = passed
        states = self._forward()
        windows = self._head(states, generator)
        for index in reversed(range(len(self._stack.blocks))):
            self._block(index, windows)
        self._embedding(windows)

    @torch.no_grad()
    def _forward(self) -> list[Tensor]:
        """What the last block gives, by window; notes what enters each block."""
        stack, count, length = self._stack, *self._ids.shape
        with self._skeleton.loaded(stack.name, without=stack.list_name) as owner:
            hidden = stack.embed(self._ids, lambda width: ListBuffer([length] * count, width))
            with torch.enable_grad(), _requiring_gradients(owner):
                arguments = [each.arguments for each in stack.recorded(self._ids[:1])]
                self._dependent = [[tensor.requires_grad for tensor in tensors(each)] for each in arguments]
        stream = Stream(compressed=False, hidden=hidden)
        for index, path in enumerate(stack.blocks):
            entered: list[_Entered] = []
            weights = self._weights(path)
            before = hidden.tokens.clone().view(count, 1, length, -1)
            with self._skeleton.loaded(path) as block:
                for number in range(count):
                    states = hidden.samples(number, number + 1)
                    shared = mapped(stream.shared_of(number), lambda tensor: tensor)
                    entered.append(_Entered(before[number], stream.carried.get(number, ()), shared))
                    states.copy_(stack.run(index, block, stream, number, number + 1, keep=True))
                    self._passed(path, FORWARD * weights)
            self._entered.append(entered)
        return [hidden.samples(number, number + 1) for number in range(count)]

    @torch.enable_grad()
    def _head(self, states: list[Tensor], generator: torch.Generator) -> list[_Window]:
        """Draw the tokens, and show the gradients of the head, unless it is tied to the embedding."""
        windows: list[_Window] = []
        # One allocation: small ones that stay, between large ones that go, keep the large ones' memory from the system.
        gradients, drawn = torch.zeros(len(states), *states[0].shape), torch.zeros_like(self._ids)
        owner = self._skeleton.module.get_submodule(self._stack.name)
        with self._tail.loaded():
            self._tail.require_last_alone(self._ids, states[0])
            self._joint = self._reads(owner, states[0])
            for path in self._tail.heads:
                self._watch_below(path, but=owner)
            for ids, each, gradient, targets in zip(self._ids, states, gradients, drawn, strict=True):
                given = _leaf(each)
                logits = self._tail.logits(ids[None], given)[0].float()
                if not are_finite(logits):
                    raise self._tail.non_finite(ids[None], each)
                # Drawn on the CPU: the same tokens whatever the device.
                chances = logits.detach().softmax(-1).cpu()
                targets.copy_(torch.multinomial(chances, 1, generator=generator)[:, 0])
                _backward([(_loss(logits, targets), None)])
                assert given.grad is not None
                windows.append(_Window(gradient.copy_(given.grad), targets, each if self._joint else None))
                self._passed("head", BACKWARD * self._head_weights)
        return windows

    def _reads(self, owner: nn.Module, states: Tensor) -> bool:
        """Whether logits depend on a weight below the owner of the blocks whose gradient is wanted."""
        with _requiring_gradients(owner):
            wanted = [own for name, own in self._loaded(self._stack.name) if self._watch.wants(name)]
            logits = self._tail.logits(self._ids[:1, :PROBED], states[:, :PROBED])
            found = torch.autograd.grad(logits.sum(), wanted, allow_unused=True) if wanted else ()
        return any(gradient is not None for gradient in found)

    @torch.enable_grad()
    def _block(self, index: int, windows: list[_Window]) -> None:
        """From gradients of what a block gives to those of its parameters and of what entered it."""
        path = self._stack.blocks[index]
        weights = self._weights(path)
        with self._skeleton.loaded(path) as block:
            self._watch_below(path)
            for number, (entered, window) in enumerate(zip(self._entered.pop(), windows, strict=True)):
                self._through(index, block, number, entered, window)
                self._passed(path, BACKWARD * weights)

    def _through(self, index: int, block: nn.Module, number: int, entered: _Entered, window: _Window) -> None:
        """A window through a block and back; its gradients become those of what entered the block."""
        stack = self._stack
        hidden = _leaf(entered.hidden.to(self._skeleton.device))
        carried, shared = mapped((entered.carried, entered.shared), _leaf)
        handed = tensors((carried, shared))
        flags, leaves = iter(self._dependent[index]), []

        def followed(tensor: Tensor) -> Tensor:
            if not next(flags):
                return tensor
            leaves.append(_leaf(tensor))
            return leaves[-1]

        arguments = mapped(stack.arguments(number, index), followed)
        states = hidden.clone().view(*hidden.shape[:2], *stack.shape)  # a block may write to what it is given
        output = stack.call(block, states, arguments, carried, shared, None)
        first, *others = output if isinstance(output, tuple) else (output,)
        given = tensors((tuple(others), shared))
        assert not window.handed or len(window.handed) == len(given), "blocks hand on the same when they run again"
        roots = [(first.flatten(2), window.hidden), *zip_longest(given, window.handed)]
        _backward((tensor, gradient) for tensor, gradient in roots if gradient is not None)
        assert hidden.grad is not None
        window.hidden.copy_(hidden.grad)
        window.handed = [tensor.grad for tensor in handed]
        window.arguments[index] = [leaf.grad for leaf in leaves]

    @torch.enable_grad()
    def _embedding(self, windows: list[_Window]) -> None:
        """Gradients of what computes the first hidden states and the blocks' arguments."""
        stack = self._stack
        weights = self._weights(stack.name)
        tail = self._tail.loaded() if self._joint else nullcontext()
        with self._skeleton.loaded(stack.name, without=stack.list_name), tail:
            self._watch_below(stack.name)
            for number, window in enumerate(windows):
                stand_ins = stack.recorded(self._ids[number : number + 1])
                roots: list[tuple[Tensor, Tensor | None]] = [(stand_ins[0].hidden.flatten(2), window.hidden)]
                for index, stand_in in enumerate(stand_ins):
                    found = zip(tensors(stand_in.arguments), self._dependent[index], strict=True)
                    depend = [tensor for tensor, flag in found if flag]
                    pairs = zip(depend, window.arguments[index], strict=True)
                    roots += [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
                if window.states is not None:
                    logits = self._tail.logits(self._ids[number : number + 1], window.states)[0].float()
                    roots.append((_loss(logits, window.drawn), None))
                _backward(roots)
                self._passed("embedding", BACKWARD * weights)

    def _refuse_shared(self) -> None:
        owner: dict[str, str] = {}
        for path in self._stack.blocks:
            for name, _ in self._skeleton.module.get_submodule(path).named_parameters(path):
                origin = self._skeleton.origin(name)
                if self._watch.wants(origin) and owner.setdefault(origin, path) != path:
                    message = f"'{owner[origin]}' and '{path}' share '{origin}', whose gradient is not followed"
                    raise UnsupportedModelError(message)

    def _watch_below(self, path: str, but: nn.Module | None = None) -> None:
        """Have gradients of the loaded parameters below a module looked at, except for those of another module."""
        others = set() if but is None else set(map(id, but.parameters()))
        for name, parameter in self._loaded(path):
            if id(parameter) not in others and self._watch.wants(name):
                self._watch.watch(name, parameter)

    def _loaded(self, path: str) -> Iterator[tuple[str, nn.Parameter]]:
        """The loaded parameters below a module, tied ones by the name of the other."""
        for name, parameter in self._skeleton.module.get_submodule(path).named_parameters(path):
            if not parameter.is_meta:
                yield self._skeleton.origin(name), parameter

    @property
    def _head_weights(self) -> int:
        return sum(map(self._weights, self._tail.heads))

    def _weights(self, path: str) -> int:
        """Weights below a module; of the owner of the blocks without theirs."""
        blocks = f"{self._stack.list_path}."
        parameters = self._skeleton.module.get_submodule(path).named_parameters(path)
        within = f"{path}.".startswith(blocks)
        return sum(own.numel() for name, own in parameters if within or not name.startswith(blocks))


def _leaf(tensor: Tensor) -> Tensor:
    """The tensor as an input whose gradient is wanted; as it is where it has none."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def _loss(logits: Tensor, drawn: Tensor) -> Tensor:
    """The loss in nats of tokens [L], summed."""
    return nn.functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum")


def _backward(roots: Roots) -> None:
    """Gradients of all leaves, in one pass: each parameter's is complete once, and shown once."""
    follow = [(tensor, gradient) for tensor, gradient in roots if tensor.requires_grad]
    if follow:
        given = [None if gradient is None else gradient.to(tensor.device) for tensor, gradient in follow]
        torch.autograd.backward([tensor for tensor, _ in follow], given)


@contextmanager
def _requiring_gradients(owner: nn.Module) -> Iterator[None]:
    """With gradients of all loaded parameters."""
    loaded = [own for own in owner.parameters() if not own.is_meta and own.is_floating_point()]
    for parameter in loaded:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in loaded:
            parameter.requires_grad_(False)

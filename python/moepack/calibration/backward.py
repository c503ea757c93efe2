"""Computes the loss of a decoder and its gradients block by block: forward through all blocks, then backward.

The forward pass stores the inputs of each block. In the backward pass, each block is loaded again with its experts. It
recomputes its outputs window by window, and converts the gradient of its outputs into the gradients of its parameters
and inputs. So the checkpoint is read twice. For any size of the model, memory holds one block in float32, one window's
gradient of one or a few of its parameters, and the inputs of each block, N * L * W * 4 bytes each.

Gradients also pass through everything else that blocks pass on besides hidden states: additional outputs of the
previous block (`Carried`), values that earlier blocks left in a mapping (`Shared`), and arguments that the embedding's
module computes from weights.

If both the embedding's module and the tail use a parameter (a tied head), its gradient is the sum of both gradients
within a window. The tail therefore runs again together with the embedding, so no gradient is kept across windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from moepack.calibration.arguments import mapped, tensors
from moepack.calibration.buffer import ListBuffer
from moepack.calibration.factored import Gradients, Watch
from moepack.calibration.skeleton import Skeleton
from moepack.calibration.stacks import Stack
from moepack.calibration.stream import Stream
from moepack.calibration.tail import Tail
from moepack.decoding.finite import are_finite
from moepack.errors import UnsupportedModelError
from moepack.solvers.products import fast_products

__all__ = ["Backward", "Passed", "draw_tokens"]

FORWARD, BACKWARD = 1, 3
"""Passes over weights per window: one forward, and three backward (outputs, and two kinds of gradients)."""

DRAWN = 16
"""Rows of logits from which tokens are drawn at a time."""

PROBED = 4
"""Number of tokens of the test that finds which inputs logits depend on."""

Roots = Iterable[tuple[Tensor, Tensor | None]]
"""Tensors, each with the gradient of the loss with respect to it; None for the loss itself."""

Passed = Callable[[str, int], None]
"""Progress callback: the place (a block's path, "head" or "embedding") and the weights that a window passed there."""


@dataclass
class _Entered:
    """Inputs of a block for one window: hidden states [1, L, W], and values that earlier blocks passed on."""

    hidden: Tensor
    carried: Any
    shared: Any


@dataclass
class _Window:
    """State of a window in the backward pass.

    Attributes:
        hidden: [1, L, W], gradient of the hidden states between two blocks; updated in place.
        drawn: [L], the drawn tokens.
        states: [1, L, W], outputs of the last block; None unless the tail runs again.
        handed: gradients of the other values that the two blocks exchange; empty after the last block.
        arguments: gradients of the arguments that depend on weights, by block.
    """

    hidden: Tensor
    drawn: Tensor
    states: Tensor | None
    handed: list[Tensor | None] = field(default_factory=list)
    arguments: dict[int, list[Tensor | None]] = field(default_factory=dict)


class Backward:
    """One pass over windows of text.

    Args:
        skeleton: skeleton of the model, with its experts.
        stack: its blocks, with batches of one window.
        ids: [N, L] tokens.
        watch: receives the gradients.

    Raises:
        UnsupportedModelError: blocks share a parameter, whose gradient would not be complete within one block.
    """

    def __init__(self, skeleton: Skeleton, stack: Stack, ids: Tensor, watch: Watch) -> None:
        assert stack.batch == 1, "gradients are kept per window"
        self._skeleton, self._stack, self._ids, self._watch = skeleton, stack, ids, watch
        self._gradients = Gradients(watch)
        self._passed: Passed = lambda path, weights: None
        self._refuse_shared()
        self._tail = Tail(skeleton, stack)
        self._joint = False
        self._dependent: list[list[bool]] = []
        self._entered: list[list[_Entered]] = []

    @property
    def work(self) -> int:
        """Sum of all weights that will be reported to `passed`."""
        blocks = (FORWARD + BACKWARD) * sum(map(self._weights, self._stack.blocks))
        return len(self._ids) * (blocks + BACKWARD * (self._head_weights + self._weights(self._stack.name)))

    def run(self, generator: torch.Generator, passed: Passed) -> None:
        """Compute the gradients of each window's summed loss; targets are drawn from the model's predictions.

        Args:
            generator: generator of the targets, on the CPU.
            passed: receives the progress.

        Raises:
            CalibrationError: a block computes NaN or infinity; names the block.
            NonFiniteError: the tail computes NaN or infinity.
            UnsupportedModelError: a block or the tail reads more than the outputs of the previous block.
        """
        self._passed = passed
        states = self._forward()
        windows = self._head(states, generator)
        for index in reversed(range(len(self._stack.blocks))):
            self._block(index, windows)
        self._embedding(windows)

    @torch.no_grad()
    def _forward(self) -> list[Tensor]:
        """Return the outputs of the last block by window, and store the inputs of each block."""
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
        """Draw the targets, and compute the gradients of the head unless it is tied to the embedding."""
        windows: list[_Window] = []
        # One allocation: small long-lived ones between large temporary ones would prevent the release of memory.
        gradients, drawn = torch.zeros(len(states), *states[0].shape), torch.zeros_like(self._ids)
        owner = self._skeleton.module.get_submodule(self._stack.name)
        with self._tail.loaded():
            self._tail.require_last_alone(self._ids, states[0])
            self._joint = self._reads(owner, states[0])
            for path in self._tail.heads:
                self._watch_below(path, but=owner)
            with self._observed(() if self._joint else self._tail.heads):
                for ids, each, gradient, targets in zip(self._ids, states, gradients, drawn, strict=True):
                    given = _leaf(each)
                    with self._gradients:
                        logits = self._tail.logits(ids[None], given)[0].float()
                    if not are_finite(logits):
                        raise self._tail.non_finite(ids[None], each)
                    # Drawn on the CPU, so that the device does not influence the tokens.
                    targets.copy_(draw_tokens(logits.detach(), generator))
                    with fast_products(self._ids.shape[1] * self._head_weights):
                        _backward([(_loss(logits, targets), None)])
                        self._gradients.finish()
                    assert given.grad is not None
                    windows.append(_Window(gradient.copy_(given.grad), targets, each if self._joint else None))
                    self._passed("head", BACKWARD * self._head_weights)
        return windows

    def _reads(self, owner: nn.Module, states: Tensor) -> bool:
        """Return whether logits depend on a watched parameter below the owner of the blocks."""
        with _requiring_gradients(owner):
            wanted = [own for name, own in self._loaded(self._stack.name) if self._watch.wants(name)]
            logits = self._tail.logits(self._ids[:1, :PROBED], states[:, :PROBED])
            found = torch.autograd.grad(logits.sum(), wanted, allow_unused=True) if wanted else ()
        return any(gradient is not None for gradient in found)

    @torch.enable_grad()
    def _block(self, index: int, windows: list[_Window]) -> None:
        """Convert gradients of a block's outputs into those of its parameters and inputs."""
        path = self._stack.blocks[index]
        weights = self._weights(path)
        with self._skeleton.loaded(path) as block:
            self._watch_below(path)
            for number, (entered, window) in enumerate(zip(self._entered.pop(), windows, strict=True)):
                self._through(index, block, number, entered, window)
                self._passed(path, BACKWARD * weights)

    def _through(self, index: int, block: nn.Module, number: int, entered: _Entered, window: _Window) -> None:
        """Run a window through a block and back; updates its gradients to those of the block's inputs."""
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
        states = hidden.clone().view(*hidden.shape[:2], *stack.shape)  # a block may modify its inputs
        with self._gradients:
            output = stack.call(block, states, arguments, carried, shared, None)
        first, *others = output if isinstance(output, tuple) else (output,)
        given = tensors((tuple(others), shared))
        assert not window.handed or len(window.handed) == len(given), "a second run of a block passes on other values"
        roots = [(first.flatten(2), window.hidden), *zip_longest(given, window.handed)]
        _backward((tensor, gradient) for tensor, gradient in roots if gradient is not None)
        self._gradients.finish()
        assert hidden.grad is not None
        window.hidden.copy_(hidden.grad)
        window.handed = [tensor.grad for tensor in handed]
        window.arguments[index] = [leaf.grad for leaf in leaves]

    @torch.enable_grad()
    def _embedding(self, windows: list[_Window]) -> None:
        """Compute the gradients of the module that computes the first hidden states and the blocks' arguments."""
        stack = self._stack
        weights = self._weights(stack.name)
        tail = self._tail.loaded() if self._joint else nullcontext()
        with ExitStack() as opened:
            opened.enter_context(self._skeleton.loaded(stack.name, without=stack.list_name))
            opened.enter_context(tail)
            self._watch_below(stack.name)
            opened.enter_context(self._observed([stack.name, *(self._tail.heads if self._joint else ())]))
            for number, window in enumerate(windows):
                with self._gradients:
                    stand_ins = stack.recorded(self._ids[number : number + 1])
                roots: list[tuple[Tensor, Tensor | None]] = [(stand_ins[0].hidden.flatten(2), window.hidden)]
                for index, stand_in in enumerate(stand_ins):
                    found = zip(tensors(stand_in.arguments), self._dependent[index], strict=True)
                    depend = [tensor for tensor, flag in found if flag]
                    pairs = zip(depend, window.arguments[index], strict=True)
                    roots += [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
                if window.states is not None:
                    with self._gradients:
                        logits = self._tail.logits(self._ids[number : number + 1], window.states)[0].float()
                    roots.append((_loss(logits, window.drawn), None))
                with fast_products(self._ids.shape[1] * self._head_weights):
                    _backward(roots)
                    self._gradients.finish()
                self._passed("embedding", BACKWARD * weights)

    def _refuse_shared(self) -> None:
        owner: dict[str, str] = {}
        for path in self._stack.blocks:
            for name, _ in self._skeleton.module.get_submodule(path).named_parameters(path):
                origin = self._skeleton.origin(name)
                if self._watch.wants(origin) and owner.setdefault(origin, path) != path:
                    message = f"'{owner[origin]}' and '{path}' share '{origin}', whose gradient is not supported"
                    raise UnsupportedModelError(message)

    def _watch_below(self, path: str, but: nn.Module | None = None) -> None:
        """Watch the loaded parameters below a module, except for those of another module."""
        others = set() if but is None else set(map(id, but.parameters()))
        for name, parameter in self._loaded(path):
            if id(parameter) not in others and self._watch.wants(name):
                self._gradients.watch(name, parameter)

    @contextmanager
    def _observed(self, paths: Iterable[str]) -> Iterator[None]:
        """Observe the calls of the loaded modules at or below some paths, other than blocks."""
        with ExitStack() as opened:
            for path in paths:
                for name, module in self._skeleton.module.get_submodule(path).named_modules(prefix=path):
                    weight = module._parameters.get("weight")
                    if weight is not None and not weight.is_meta:
                        origin = self._skeleton.origin(f"{name}.weight")
                        opened.enter_context(self._watch.observe(origin, module))
            yield

    def _loaded(self, path: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the loaded parameters below a module by name; tied ones have the name of their origin."""
        for name, parameter in self._skeleton.module.get_submodule(path).named_parameters(path):
            if not parameter.is_meta:
                yield self._skeleton.origin(name), parameter

    @property
    def _head_weights(self) -> int:
        return sum(map(self._weights, self._tail.heads))

    def _weights(self, path: str) -> int:
        """Return the number of weights below a module; the owner of the blocks counts without the blocks."""
        blocks = f"{self._stack.list_path}."
        parameters = self._skeleton.module.get_submodule(path).named_parameters(path)
        within = f"{path}.".startswith(blocks)
        return sum(own.numel() for name, own in parameters if within or not name.startswith(blocks))


def _leaf(tensor: Tensor) -> Tensor:
    """Return a floating-point tensor detached, with gradients; other tensors unchanged."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def draw_tokens(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token for each row of logits [L, V] from their softmax, [L] int64.

    Inverts the distribution function at one random number a row, where `torch.multinomial` draws one for each logit.
    """
    chosen = torch.rand(len(logits), 1, dtype=torch.float64, generator=generator)
    drawn = torch.empty(len(logits), dtype=torch.int64)
    for first in range(0, len(logits), DRAWN):  # the sums of all rows would take three times the memory of the logits
        part = slice(first, first + DRAWN)
        own = logits[part].cpu()
        sums = (own - own.amax(-1, keepdim=True)).exp_().cumsum(-1, dtype=torch.float64)
        drawn[part] = torch.searchsorted(sums, chosen[part] * sums[:, -1:], right=True)[:, 0]
    return drawn.clamp_(max=logits.shape[1] - 1)


def _loss(logits: Tensor, drawn: Tensor) -> Tensor:
    """Return the summed loss of tokens [L] in nats."""
    return nn.functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum")


def _backward(roots: Roots) -> None:
    """Compute the gradients of all leaves in one pass, so each parameter's gradient is completed exactly once."""
    follow = [(tensor, gradient) for tensor, gradient in roots if tensor.requires_grad]
    if follow:
        given = [None if gradient is None else gradient.to(tensor.device) for tensor, gradient in follow]
        torch.autograd.backward([tensor for tensor, _ in follow], given)


@contextmanager
def _requiring_gradients(owner: nn.Module) -> Iterator[None]:
    """Enable gradients of all loaded parameters."""
    loaded = [own for own in owner.parameters() if not own.is_meta and own.is_floating_point()]
    for parameter in loaded:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in loaded:
            parameter.requires_grad_(False)

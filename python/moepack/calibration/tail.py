"""What follows the last block of a decoder: a norm, a head, and whatever the model's own forward does with them.

The model's forward runs with one stand-in in the place of all blocks, which answers with states that are given. So no
architecture's ending (scaled or capped logits) is written again here. The embedding is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from moepack.calibration.arguments import StandIn
from moepack.calibration.skeleton import Skeleton
from moepack.calibration.stacks import Stack
from moepack.errors import NonFiniteError
from moepack.runtime.finite import non_finite_in

__all__ = ["Tail"]


class Tail:
    """The end of a model.

    Attributes:
        parts: paths of the modules that it needs.
    """

    def __init__(self, skeleton: Skeleton, stack: Stack) -> None:
        """Describe the tail of the model whose blocks are `stack`, which must have embedded tokens."""
        self._skeleton, self._stack = skeleton, stack
        whole: Any = skeleton.module
        embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
        children = ((f"{stack.name}.{name}", child) for name, child in stack.module.named_children())
        self.parts = [path for path, child in children if child is not embedding and path != stack.list_path]
        if head is not None:
            self.parts.append(next(path for path, module in whole.named_modules() if module is head))
        else:  # such as a classifier of tokens
            beside = (path for path, _ in whole.named_children() if not f"{stack.name}.".startswith(f"{path}."))
            self.parts.extend(beside)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """With the weights of the tail on the device."""
        with ExitStack() as loaded:
            for part in self.parts:
                loaded.enter_context(self._skeleton.loaded(part))
            yield

    def logits(self, states: Tensor) -> Tensor:
        """The logits [B, L, V] for what the last block gave, [B, L, W] with W as the stack's states; while loaded."""
        return self._run(states).logits  # type: ignore[no-any-return]

    def non_finite(self, states: Tensor) -> NonFiniteError:
        """The error of a model whose logits are not finite for these states; names the module."""
        return non_finite_in(self._skeleton.module, lambda: self._run(states), self._skeleton.dtype)

    def _run(self, states: Tensor) -> Any:
        stack, whole = self._stack, self._skeleton.module
        blocks = getattr(stack.module, stack.list_name)
        states = states.view(*states.shape[:2], *stack.shape)
        stand_in = StandIn(blocks[-1], last=False, outputs=stack.outputs)
        stand_in.change = lambda _: states
        setattr(stack.module, stack.list_name, nn.ModuleList([stand_in]))
        try:
            entered = states.new_zeros(*states.shape[:2], stack.shape[-1])
            return whole(inputs_embeds=entered, use_cache=False)
        finally:
            setattr(stack.module, stack.list_name, blocks)

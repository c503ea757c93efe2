"""What follows the last block of a decoder: a norm, a head, and whatever the model's own forward does with them.

The model's forward runs with stand-ins for its blocks, the last of which answers with states that are given. So no
architecture's ending (scaled or capped logits, an embedding that is read again) is written again here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from moepack.calibration.skeleton import Skeleton
from moepack.calibration.stacks import Stack
from moepack.errors import NonFiniteError, UnsupportedModelError
from moepack.runtime.finite import non_finite_in

__all__ = ["Tail"]

PROBED = 4
"""Tokens with which it is found out what logits depend on."""


class Tail:
    """The end of a model, whose blocks have one owner; embedding and norms are below it.

    Attributes:
        heads: paths of what makes logits of the owner's outputs.
    """

    def __init__(self, skeleton: Skeleton, stack: Stack) -> None:
        """Describe the tail of the model with these blocks."""
        self._skeleton, self._stack = skeleton, stack
        whole: Any = skeleton.module
        head = whole.get_output_embeddings()
        if head is not None:
            self.heads = [next(path for path, module in whole.named_modules() if module is head)]
        else:  # such as a classifier of tokens
            outside = (path for path, _ in whole.named_children() if not f"{stack.name}.".startswith(f"{path}."))
            self.heads = list(outside)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """With the weights of everything but the blocks on the device."""
        with ExitStack() as loaded:
            loaded.enter_context(self._skeleton.loaded(self._stack.name, without=self._stack.list_name))
            for path in self.heads:
                loaded.enter_context(self._skeleton.loaded(path))
            yield

    def logits(self, ids: Tensor, states: Tensor) -> Tensor:
        """The logits while the tail is loaded.

        Args:
            ids: [B, L] tokens.
            states: [B, L, W], what the last block gave for them.

        Returns:
            [B, L, V].

        Raises:
            UnsupportedModelError: transformers cannot compute them.
        """
        return self._run(ids, states)

    def require_last_alone(self, ids: Tensor, states: Tensor) -> None:
        """Refuse a model whose logits depend on what blocks before the last one gave; arguments as of `logits`."""
        ids, states = ids[:1, :PROBED], states[:1, :PROBED]
        with torch.no_grad():
            one, other = (self._run(ids, states, factor) for factor in (1.0, 2.0))
        if not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
            raise UnsupportedModelError(
                f"the head of {type(self._skeleton.module).__name__} reads more than the last block gives"
            )

    def non_finite(self, ids: Tensor, states: Tensor) -> NonFiniteError:
        """The error of a model whose logits are not finite; names the module. Arguments as of `logits`."""
        return non_finite_in(self._skeleton.module, lambda: self._run(ids, states), self._skeleton.dtype)

    def _run(self, ids: Tensor, states: Tensor, factor: float = 1.0) -> Tensor:
        """The logits, where blocks before the last one give a multiple of the first hidden states."""
        stack, whole, device = self._stack, self._skeleton.module, self._skeleton.device
        states = states.to(device).view(*states.shape[:2], *stack.shape)
        with stack.stand_ins() as stand_ins:
            for stand_in in stand_ins:
                stand_in.change = lambda hidden: factor * hidden
            stand_ins[-1].change = lambda _: states
            try:
                return whole(input_ids=ids.to(device), use_cache=False).logits  # type: ignore[no-any-return]
            except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError) as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                message = f"transformers cannot compute the logits of {type(whole).__name__} ({reason})"
                raise UnsupportedModelError(message) from error

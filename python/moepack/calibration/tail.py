"""The part of a decoder after its last block: a norm, a head, and further operations of the model's forward.

The model's forward runs with stand-ins for its blocks, and the last stand-in returns given states. So this module needs
no code for features of specific architectures, such as scaled or capped logits or a second use of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from moepack.calibration.skeleton import Skeleton
from moepack.calibration.stacks import Stack
from moepack.decoding.finite import non_finite_in
from moepack.errors import NonFiniteError, UnsupportedModelError
from moepack.solvers.products import fast_products

__all__ = ["Tail"]

PROBED = 4
"""Number of tokens that `require_last_alone` uses."""


class Tail:
    """The tail of a model whose blocks belong to one parent module, which also contains the embedding and the norms.

    Attributes:
        heads: paths of the modules that compute logits from the parent module's outputs.
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

    @property
    def weights(self) -> int:
        """Number of weights of the heads."""
        return sum(own.numel() for path in self.heads for own in self._skeleton.module.get_submodule(path).parameters())

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Load all weights except those of the blocks to the device."""
        with ExitStack() as loaded:
            loaded.enter_context(self._skeleton.loaded(self._stack.name, without=self._stack.list_name))
            for path in self.heads:
                loaded.enter_context(self._skeleton.loaded(path))
            yield

    def logits(self, ids: Tensor, states: Tensor) -> Tensor:
        """Return the logits, [B, L, V]; requires a loaded tail.

        Args:
            ids: [B, L] tokens.
            states: [B, L, W], outputs of the last block for these tokens.

        Raises:
            UnsupportedModelError: transformers cannot compute the logits.
        """
        return self._run(ids, states)

    def require_last_alone(self, ids: Tensor, states: Tensor) -> None:
        """Reject a model whose logits depend on outputs of blocks before the last one; arguments as for `logits`.

        Raises:
            UnsupportedModelError: the logits depend on such outputs.
        """
        ids, states = ids[:1, :PROBED], states[:1, :PROBED]
        with torch.no_grad():
            one, other = (self._run(ids, states, factor) for factor in (1.0, 2.0))
        if not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
            raise UnsupportedModelError(
                f"the logits of {type(self._skeleton.module).__name__} depend on outputs of blocks before the last one"
            )

    def non_finite(self, ids: Tensor, states: Tensor) -> NonFiniteError:
        """Return the error for logits that are not finite, which names the module; arguments as for `logits`."""
        return non_finite_in(self._skeleton.module, lambda: self._run(ids, states), self._skeleton.dtype)

    def _run(self, ids: Tensor, states: Tensor, factor: float = 1.0) -> Tensor:
        """Return the logits if the last block returns `states`, and all others their input times `factor`."""
        stack, whole, device = self._stack, self._skeleton.module, self._skeleton.device
        states = states.to(device).view(*states.shape[:2], *stack.shape)
        with stack.stand_ins() as stand_ins:
            for stand_in in stand_ins:
                stand_in.change = lambda hidden: factor * hidden
            stand_ins[-1].change = lambda _: states
            try:
                with fast_products(ids.numel() * self.weights):
                    return whole(input_ids=ids.to(device), use_cache=False).logits  # type: ignore[no-any-return]
            except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError) as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                message = f"transformers cannot compute the logits of {type(whole).__name__} ({reason})"
                raise UnsupportedModelError(message) from error

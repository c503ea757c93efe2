"""A transformers model without weights, whose parts are loaded from the checkpoint one at a time.

The model is built on torch's meta device, so it takes no memory at any size. Experts modules are optionally replaced by
a recorder: their matrices are then never loaded through the model but fetched expert by expert. `loaded` loads the
weights of one submodule (a block, an embedding, a norm) and drops them again.

Invariants: outside of `loaded`, no parameter holds memory. Within it a tied parameter is one object wherever it is
used, so its gradient is that of all uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moepack.calibration.recorder import Recorder
from moepack.checkpoint import Checkpoint
from moepack.checkpoint.classes import building, meta_model
from moepack.checkpoint.model import MoeLayer, MoeModel
from moepack.checkpoint.names import Names
from moepack.errors import CheckpointError, UnsupportedModelError

__all__ = ["Skeleton"]


def _built(checkpoint: Checkpoint) -> tuple[Any, nn.Module]:
    """Return configuration and model, on the meta device."""
    with building(checkpoint.path):
        model = meta_model(checkpoint.path, checkpoint.config).eval()
    return model.config, model


_EXACT = (torch.bool, torch.int32, torch.int64)


def _unset(dtype: torch.dtype) -> float:
    """Return a value that no computed buffer contains."""
    if dtype not in _EXACT:
        return float("nan")
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


class Skeleton:
    """The model of a checkpoint, on the meta device.

    Attributes:
        module: the transformers model.
        config: its configuration.
        recorders: the recorder of each sparse layer, by the layer's name; empty if experts are kept.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: MoeModel,
        *,
        dtype: torch.dtype,
        device: torch.device,
        recorded: bool = True,
    ) -> None:
        """Build the model.

        Args:
            checkpoint, model: the model to build.
            dtype: of the weights once they are loaded.
            device: where they are loaded to.
            recorded: replace experts modules by recorders.

        Raises:
            UnsupportedModelError: transformers cannot build a model from config.json, or it lacks experts that the
                checkpoint's description names.
        """
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.config, self.module = _built(checkpoint)
        self._names = Names(checkpoint, self.module)
        self._held: dict[str, nn.Parameter] = {}
        self._origins: dict[str, str] = {}
        self.recorders = {layer.name: self._replace_experts(layer) for layer in model.layers} if recorded else {}
        self._fill_buffers()

    def _replace_experts(self, layer: MoeLayer) -> Recorder:
        try:
            module = self.module.get_submodule(layer.name)
        except AttributeError as error:
            raise UnsupportedModelError(f"{type(self.module).__name__} has no module '{layer.name}'") from error
        recorder = Recorder(layer, module)
        self.module.set_submodule(layer.name, recorder)
        return recorder

    def _fill_buffers(self) -> None:
        """Compute the buffers that no checkpoint stores, such as the frequencies of rotary embeddings.

        Buffers that transformers does not recompute keep no values; submodules that are not run may have them.
        """
        for module in self.module.modules():
            lost = {
                name: old
                for name in module._non_persistent_buffers_set
                if (old := module._buffers.get(name)) is not None
            }
            if not lost:
                continue
            for name, old in lost.items():
                module._buffers[name] = torch.full(old.shape, _unset(old.dtype), dtype=old.dtype, device=self.device)
            with torch.no_grad():
                self.module._init_weights(module)  # type: ignore[operator]
            for name, old in lost.items():
                value = module.get_buffer(name)
                if bool((value == _unset(value.dtype) if value.dtype in _EXACT else torch.isnan(value)).any()):
                    module._buffers[name] = old

    @contextmanager
    def loaded(self, name: str, without: str | None = None) -> Iterator[nn.Module]:
        """Load the weights of the submodule `name` onto the device, except its child `without`.

        The weights are dropped on exit. Calls may be nested: weights that are already loaded stay, and tied parameters
        are shared.

        Raises:
            CheckpointError: a weight is missing or does not have the model's shape.
        """
        module = self.module.get_submodule(name)
        filled: list[tuple[nn.Module, str, Tensor]] = []
        held: list[str] = []
        try:
            for path, owner in module.named_modules(prefix=name):
                if without is not None and f"{path}.".startswith(f"{name}.{without}."):
                    continue
                for tensors in (owner._parameters, owner._buffers):
                    for leaf, tensor in tensors.items():
                        if tensor is not None and tensor.is_meta:
                            if leaf in owner._non_persistent_buffers_set:
                                raise UnsupportedModelError(f"cannot compute the buffer '{path}.{leaf}'")
                            filled.append((owner, leaf, tensor))
                            is_parameter = isinstance(tensor, nn.Parameter)
                            fetch = partial(self._parameter, held=held) if is_parameter else self._fetch
                            tensors[leaf] = fetch(f"{path}.{leaf}", tensor)
            yield module
        finally:
            for owner, leaf, tensor in filled:
                store: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
                store[leaf] = tensor
            for origin in held:
                del self._held[origin]

    def origin(self, name: str) -> str:
        """The parameter that a parameter is tied to; its own name where it is not tied.

        As transformers does, a parameter that is stored with other values than the one it is tied to is not tied.
        """
        if name not in self._origins:
            other = self._names.tied.get(name, name)
            stored = [self._names.plain[each] for each in (name, other) if each in self._names.plain]
            apart = other != name and len(stored) == 2 and not torch.equal(*map(self.checkpoint.tensor, stored))
            self._origins[name] = name if apart else other
        return self._origins[name]

    def _parameter(self, name: str, like: nn.Parameter, held: list[str]) -> nn.Parameter:
        """A parameter of the model, on the device; notes in `held` that it is new."""
        origin = self.origin(name)
        if origin not in self._held:
            self._held[origin] = nn.Parameter(self._fetch(name, like), requires_grad=False)
            held.append(origin)
        return self._held[origin]

    def _converted(self, name: str) -> Tensor | None:
        """Return a tensor that transformers converts; on the device, if it has the memory for it."""
        try:
            return self._names.converted(name, self.module, self.device)
        except torch.OutOfMemoryError:
            return self._names.converted(name, self.module)

    def _fetch(self, name: str, like: Tensor) -> Tensor:
        """Return a tensor of the model, on the device."""
        source = self._names.plain.get(name) or self._names.plain.get(self._names.tied.get(name, ""))
        value = self._converted(name) if source is None else self.checkpoint.tensor(source)
        if value is None:
            raise CheckpointError(
                "the model requires it, but the checkpoint does not have it", file=self.checkpoint.path, tensor=name
            )
        if value.shape != like.shape:
            message = f"has shape {list(value.shape)}, but the model expects {list(like.shape)}"
            raise CheckpointError(message, file=self.checkpoint.path, tensor=source or name)
        dtype = self.dtype if like.is_floating_point() else value.dtype
        # Always a copy: the mapped pages are released with the source, and nothing may write to them. A GPU widens
        # values itself, because fewer bytes are copied.
        moved = value.to(self.device)
        return moved.to(dtype, copy=moved is value)

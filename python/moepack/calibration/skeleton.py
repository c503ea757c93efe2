"""A transformers model without weights, whose parts are loaded from the checkpoint one at a time.

The model is built on torch's meta device, so it takes no memory at any size. Experts modules are immediately replaced
by a recorder: their matrices are never loaded through the model but fetched expert by expert. `loaded` loads the dense
weights of one submodule (a block, an embedding, a norm) and drops them again.

Invariant: outside of `loaded`, no parameter holds memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
        recorders: the recorder of each sparse layer, by the layer's name.
    """

    def __init__(self, checkpoint: Checkpoint, model: MoeModel, *, dtype: torch.dtype, device: torch.device) -> None:
        """Build the model.

        Raises:
            UnsupportedModelError: transformers cannot build a model from config.json, or it lacks experts that the
                checkpoint's description names.
        """
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.config, self.module = _built(checkpoint)
        self._names = Names(checkpoint, self.module)
        self.recorders = {layer.name: self._replace_experts(layer) for layer in model.layers}
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
        """Load the dense weights of the submodule `name` onto the device, except its child `without`.

        The weights are dropped on exit.

        Raises:
            CheckpointError: a weight is missing or does not have the model's shape.
        """
        module = self.module.get_submodule(name)
        filled: list[tuple[nn.Module, str, Tensor]] = []
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
                            self._put(tensors, leaf, self._fetch(f"{path}.{leaf}", tensor))
            yield module
        finally:
            for owner, leaf, tensor in filled:
                store: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
                store[leaf] = tensor

    def _put(self, store: Any, leaf: str, value: Tensor) -> None:
        store[leaf] = nn.Parameter(value, requires_grad=False) if isinstance(store[leaf], nn.Parameter) else value

    def _fetch(self, name: str, like: Tensor) -> Tensor:
        """Return a tensor of the model, on the device."""
        source = self._names.plain.get(name) or self._names.plain.get(self._names.tied.get(name, ""))
        value = self._names.converted(name, self.module) if source is None else self.checkpoint.tensor(source)
        if value is None:
            raise CheckpointError(
                "the model requires it, but the checkpoint does not have it", file=self.checkpoint.path, tensor=name
            )
        if value.shape != like.shape:
            message = f"has shape {list(value.shape)}, but the model expects {list(like.shape)}"
            raise CheckpointError(message, file=self.checkpoint.path, tensor=source or name)
        dtype = self.dtype if like.is_floating_point() else value.dtype
        # Always a copy: the mapped pages are released with the source, and nothing may write to them.
        return value.to(self.device, dtype, copy=True)

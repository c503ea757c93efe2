"""A transformers model without weights, whose parts are filled from the checkpoint one at a time.

The model is built on torch's meta device, so it costs nothing whatever its size. Experts modules are replaced by a
recorder at once: their weights are never loaded through the model but fetched expert by expert. `loaded` fills one
submodule (a block, an embedding, a norm) with its dense weights, and empties it again.

Invariant: outside of `loaded`, no parameter holds memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from moepack.checkpoint import Checkpoint
from moepack.checkpoint.classes import meta_model
from moepack.checkpoint.experts import form_of
from moepack.checkpoint.model import MoeModel
from moepack.errors import CheckpointError, UnsupportedModelError

__all__ = ["Recorder", "Skeleton"]


class Recorder(nn.Module):
    """Stands in for an experts module: keeps what the router sends to it and answers with a constant.

    Attributes:
        inputs: [T, H], the tokens of the last call. index: [T, k] int64, the experts of each token, -1 where a token
            has none. weights: [T, k] float32.
        activate: the inputs of an expert's last projection from the outputs of its first ones ([gate, up] or [wi]).
        answer: the constant that is returned for every token.
    """

    def __init__(self, experts: int, activate: Callable[[Sequence[Tensor]], Tensor]) -> None:
        super().__init__()
        self.experts = experts
        self.activate = activate
        self.answer = 0.0
        self.inputs = self.index = self.weights = torch.empty(0)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Record a call of an experts module in transformers' convention, or Switch's (one-hot index [T, 1, E])."""
        if index.dim() == 3:
            index = torch.where(index.sum(-1) > 0, index.argmax(-1), -1)
        self.inputs = hidden
        self.index = torch.where(index < self.experts, index, -1)
        self.weights = weights.float()
        return torch.full_like(hidden, self.answer)


def _activation(experts: nn.Module) -> Callable[[Sequence[Tensor]], Tensor]:
    """How the experts module combines the outputs of its first projections."""
    if isinstance(experts, nn.ModuleDict):  # Switch: one activation in each expert, no gate
        act: Any = experts["expert_0"].act
        return lambda parts: act(parts[0])
    form = form_of(experts)
    held = {name for name, _ in experts.named_parameters()}
    if form is None or form.kind not in ("gated", "own") or held != set(form.parameters):
        raise UnsupportedModelError(
            f"{type(experts).__name__} computes more than gate(x) * up(x) between its products, which methods that run "
            "the model cannot follow yet; finequant and rate pack it without calibration"
        )
    gate: Any = getattr(experts, "_apply_gate", None)
    if gate is None:
        raise UnsupportedModelError(f"{type(experts).__name__} has no known activation")
    return lambda parts: gate(torch.cat(list(parts), dim=-1))  # models may override it, for example to clamp


def _built(checkpoint: Checkpoint) -> tuple[Any, nn.Module]:
    """Configuration and model, on the meta device."""
    try:
        model = meta_model(checkpoint.path, checkpoint.config).eval()
        return model.config, model
    except Exception as cause:  # whatever a class of transformers makes of values that it does not expect
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        message = f"transformers cannot build the model ({reason})"
        raise UnsupportedModelError(message, file=checkpoint.path / "config.json") from cause


class Skeleton:
    """The model of a checkpoint, on the meta device.

    Attributes:
        module: the transformers model.
        config: its configuration.
        recorders: the stand-in of each sparse layer, by the layer's name.
    """

    def __init__(self, checkpoint: Checkpoint, model: MoeModel, *, dtype: torch.dtype, device: torch.device) -> None:
        """Build the model.

        Raises:
            UnsupportedModelError: transformers cannot build a model of config.json, or it has no experts where the
                checkpoint's description expects them.
        """
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.config, self.module = _built(checkpoint)
        self.recorders = {layer.name: self._replace_experts(layer.name, layer.experts) for layer in model.layers}
        self._names = self._checkpoint_names(model)
        self._fill_buffers()

    def _replace_experts(self, name: str, experts: int) -> Recorder:
        try:
            module = self.module.get_submodule(name)
        except AttributeError as error:
            raise UnsupportedModelError(f"{type(self.module).__name__} has no module '{name}'") from error
        recorder = Recorder(experts, _activation(module))
        self.module.set_submodule(name, recorder)
        return recorder

    def _checkpoint_names(self, model: MoeModel) -> dict[str, str]:
        """Name in the checkpoint of each dense tensor, by its name in the model."""
        mapping = get_checkpoint_conversion_mapping(self.config.model_type) or []
        renamings = [transform for transform in mapping if isinstance(transform, WeightRenaming)]
        names: dict[str, str] = {}
        for name in model.dense_names:
            renamed = name
            for renaming in renamings:
                renamed = renaming.rename_source_key(renamed)[0]
            names[renamed] = name
        for alias, source in dict(getattr(self.module, "_tied_weights_keys", None) or {}).items():
            if source in names:
                names.setdefault(alias, names[source])
        return names

    def _fill_buffers(self) -> None:
        """Compute the buffers that no checkpoint stores, such as the frequencies of rotary embeddings."""
        for name, module in self.module.named_modules():
            lost = [b for b in module._non_persistent_buffers_set if module._buffers.get(b) is not None]
            if not lost:
                continue
            for buffer in lost:
                old = module._buffers[buffer]
                assert old is not None
                module._buffers[buffer] = torch.full(old.shape, float("nan"), dtype=old.dtype, device=self.device)
            with torch.no_grad():
                self.module._init_weights(module)  # type: ignore[operator]
            for buffer in lost:
                if bool(torch.isnan(module.get_buffer(buffer)).any()):
                    raise UnsupportedModelError(f"do not know how to compute the buffer '{name}.{buffer}'")

    @contextmanager
    def loaded(self, name: str) -> Iterator[nn.Module]:
        """The submodule ``name`` with its dense weights on the device; they are dropped on exit.

        Raises:
            CheckpointError: a weight is missing or has another shape than the model's.
        """
        module = self.module.get_submodule(name)
        filled: list[tuple[nn.Module, str, Tensor]] = []
        try:
            for path, owner in module.named_modules(prefix=name):
                for tensors in (owner._parameters, owner._buffers):
                    for leaf, tensor in tensors.items():
                        if tensor is not None and tensor.is_meta:
                            filled.append((owner, leaf, tensor))
                            self._put(tensors, leaf, self._fetch(f"{path}.{leaf}", tensor))
            yield module
        finally:
            for owner, leaf, tensor in filled:
                store: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
                store[leaf] = tensor

    def _put(self, store: Any, leaf: str, value: Tensor) -> None:
        store[leaf] = nn.Parameter(value, requires_grad=False) if isinstance(store[leaf], nn.Parameter) else value

    def _source(self, name: str, like: Tensor) -> str:
        """The checkpoint's tensor for one of the model."""
        source = self._names.get(name)
        if source is None:
            raise CheckpointError("the model needs it, the checkpoint lacks it", file=self.checkpoint.path, tensor=name)
        info = self.checkpoint.info(source)
        if info.shape != like.shape:
            message = f"has shape {list(info.shape)}, the model expects {list(like.shape)}"
            raise CheckpointError(message, file=info.file, tensor=source)
        return source

    def _fetch(self, name: str, like: Tensor) -> Tensor:
        value = self.checkpoint.tensor(self._source(name, like))
        dtype = self.dtype if like.is_floating_point() else value.dtype
        # Always a copy: the mapped pages are given back with the source, and nothing may write to them.
        return value.to(self.device, dtype, copy=True)

"""How much the loss rises with the error of each tensor: the diagonal of the Fisher information, measured on a text.

Where weights carry errors d that have no preferred direction, the loss rises by half the sum of F d^2, with F the mean
over tokens of the squared gradient of log p(y), y drawn from the model's own prediction (Amari 1998; Martens 2014).
Predictions at different positions have uncorrelated gradients, for their mean is zero given what stands before them: so
the squared gradient of a window's sum is the sum of its tokens' squares, and a window costs one backward pass.

The model runs whole, in float32: a gradient is summed up and dropped as soon as it is complete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moepack.calibration.samples import Samples
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import EMBEDDING
from moepack.checkpoint.experts import form_of
from moepack.integrations.loading import open_model
from moepack.memory import PeakMemory, available_bytes
from moepack.progress import Progress, Silent
from moepack.runtime.finite import are_finite, non_finite

__all__ = ["LENGTH", "fisher", "fits", "owners"]

WINDOWS, LENGTH = 32, 256
"""Windows of the calibration set that are looked at, and tokens of each: 16 give means of tensors to within a tenth."""

ROOM = 1.3
"""Memory that a model needs to run so, over that of its weights in float32."""


def fisher(
    checkpoint: Checkpoint,
    model: MoeModel,
    samples: Samples,
    device: torch.device,
    progress: Progress | None = None,
) -> dict[str, Tensor] | None:
    """Measure the mean of F over the weights of each tensor that can be packed, by the packed tensor's name; of the
    embedding and the head, whose rows are tokens, row by row.

    Returns:
        What was measured, a scalar or [R] float64, in nats a token over squared weights; None for models that read two
        texts, and where the model does not fit into the memory that is free.
    """
    if not fits(checkpoint, samples, device):
        return None
    whole = open_model(checkpoint.path, torch.float32).to(device)
    tokens = {linear.source for dense in model.dense for linear in dense.linears if linear.role in (EMBEDDING, "head")}
    gradients = _Squares(whole, dict(owners(model, whole)), tokens)
    windows = samples.inputs[torch.linspace(0, len(samples.inputs) - 1, min(WINDOWS, len(samples.inputs))).long()]
    generator, progress, peak = torch.Generator().manual_seed(0), progress or Silent(), PeakMemory()
    progress.prepare("reading some of the text, for what an error of each tensor costs")
    progress.start(windows[:, :LENGTH].numel(), 0, "tokens")
    progress.stage("what errors count")
    try:
        with torch.enable_grad():
            for window in windows[:, :LENGTH]:
                torch.autograd.backward(_predict(whole, window[None].to(device), generator))
                progress.advance(len(window), peak.sample())
    finally:
        progress.finish()
    return gradients.means(windows[:, :LENGTH].numel())


def fits(checkpoint: Checkpoint, samples: Samples, device: torch.device) -> bool:
    """Whether the model reads one text, and fits in float32 into the memory that is free."""
    weights = sum(info.nbytes // info.dtype.itemsize for info in map(checkpoint.info, checkpoint.names()))
    free = available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    return samples.targets is None and (free is None or free >= ROOM * 4 * weights)


def _predict(whole: nn.Module, ids: Tensor, generator: torch.Generator) -> Tensor:
    """The loss, summed over a window, of tokens drawn from the model's own predictions."""
    logits = whole(input_ids=ids, use_cache=False).logits[0].float()
    if not are_finite(logits):
        raise non_finite(whole, {"input_ids": ids})
    # Drawn on the CPU: the same tokens whatever the device.
    drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
    return nn.functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum")


class _Squares:
    """Sums of the squared gradients of parameters, by the packed tensors that the parameters hold."""

    def __init__(self, whole: nn.Module, owners: Mapping[str, list[str]], by_row: Collection[str]) -> None:
        self._sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        self._weights: dict[str, int] = defaultdict(int)
        self._by_row = by_row
        for name, parameter in whole.named_parameters():
            parameter.requires_grad_(name in owners)
            if name in owners:
                hooked: Any = parameter
                hooked.register_post_accumulate_grad_hook(lambda found, of=owners[name]: self._add(found, of))
                for owner in owners[name]:
                    self._weights[owner] += parameter.shape[1] if owner in by_row else parameter.numel()

    def _add(self, parameter: Any, owners: list[str]) -> None:
        squares = parameter.grad.square().flatten(1).sum(1, dtype=torch.float64).cpu()
        parameter.grad = None
        for owner in owners:
            self._sums[owner] = self._sums[owner] + (squares if owner in self._by_row else squares.sum())

    def means(self, tokens: int) -> dict[str, Tensor]:
        """The mean over weights, or those of a row, and tokens."""
        return {name: self._sums[name] / (weights * tokens) for name, weights in self._weights.items()}


def owners(model: MoeModel, whole: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """The parameters that hold weights to be packed, and the packed tensors that come from each.

    Gate and up projections that share a parameter have its mean.
    """
    owners = {f"{linear.name}.weight": [linear.source] for layer in model.dense for linear in layer.linears}
    for layer in model.layers:
        form = form_of(whole.get_submodule(layer.name))
        places = {} if form is None else form.places
        for part in layer.projections:
            if part.name in places:
                owners.setdefault(f"{layer.name}.{places[part.name].parameter}", []).append(part.packed_name)
    parameters = dict(whole.named_parameters())
    yield from ((name, packed) for name, packed in owners.items() if name in parameters)

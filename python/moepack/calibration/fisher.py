"""How much the loss rises with the error of each tensor: the diagonal of the Fisher information, measured on a text.

Where weights carry errors d that have no preferred direction, the loss rises by half the sum of F d^2, with F the mean
over tokens of the squared gradient of log p(y), y drawn from the model's own prediction (Amari 1998; Martens 2014).
Predictions at different positions have uncorrelated gradients, for their mean is zero given what stands before them: so
the squared gradient of a window's sum is the sum of its tokens' squares, and a window costs one backward pass.

Within a tensor F differs by orders of magnitude between rows and between columns. It is told of the balanced matrix
(`moepack.solvers.balance`), whose weights W[i, j] / (a[i] b[j]) have F (a[i] b[j])^2: numbers that do not depend on the
scales with which a function was written down.

The model runs whole, in float32: a gradient is summed up and dropped as soon as it is complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moepack.calibration.samples import Samples
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.experts import form_of
from moepack.integrations.loading import open_model
from moepack.memory import PeakMemory, available_bytes
from moepack.progress import Progress, Silent
from moepack.runtime.finite import are_finite, non_finite
from moepack.solvers.balance import Balance

__all__ = ["LENGTH", "WINDOWS", "Sensitivity", "fisher", "fits", "needed_bytes", "owners"]

WINDOWS, LENGTH = 32, 256
"""Windows of the calibration set that are looked at, and tokens of each: 16 give means of tensors to within a tenth."""

ROOM = 1.3
"""Memory that a model needs to run so, over that of its weights in float32."""


@dataclass(frozen=True)
class Sensitivity:
    """F of a tensor, in nats a token over squared weights.

    Attributes:
        mean: over its weights as they are.
        rows: [E, R] float64, of the balanced matrices, means over columns.
        columns: [E, C] float64, of the balanced matrices, means over rows.
    """

    mean: float
    rows: Tensor
    columns: Tensor


def fisher(
    checkpoint: Checkpoint,
    model: MoeModel,
    balances: Mapping[str, Balance],
    samples: Samples,
    device: torch.device,
    progress: Progress | None = None,
) -> dict[str, Sensitivity] | None:
    """Measure F of each tensor that can be packed, by the packed tensor's name.

    Args:
        checkpoint, model: what is measured.
        balances: of the tensors.
        samples: the calibration set.
        device: where the model runs.
        progress: told of the tokens.

    Returns:
        None for models that read two texts, and where the model does not fit into the memory that is free.
    """
    if not fits(checkpoint, samples, device):
        return None
    whole = open_model(checkpoint.path, torch.float32).to(device)
    gradients = _Squares(whole, dict(owners(model, whole)), balances)
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
    free = available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    return samples.targets is None and (free is None or free >= needed_bytes(checkpoint))


def needed_bytes(checkpoint: Checkpoint) -> int:
    """Memory that the whole model needs to run so."""
    infos = map(checkpoint.info, checkpoint.names())
    return math.ceil(ROOM * 4 * sum(info.nbytes // info.dtype.itemsize for info in infos))


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

    def __init__(
        self, whole: nn.Module, owners: Mapping[str, Mapping[str, View]], balances: Mapping[str, Balance]
    ) -> None:
        self._balances = balances
        self._sums: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        for name, parameter in whole.named_parameters():
            parameter.requires_grad_(name in owners)
            if name in owners:
                hooked: Any = parameter
                hooked.register_post_accumulate_grad_hook(lambda found, of=owners[name]: self._add(found, of))

    def _add(self, parameter: Any, views: Mapping[str, View]) -> None:
        gradient, parameter.grad = parameter.grad.square_(), None
        for name, view in views.items():
            squares, balance = view(gradient), self._balances[name]
            rows, columns = (each.to(squares.device).square() for each in (balance.rows, balance.columns))
            found = (
                squares.sum((1, 2), dtype=torch.float64).sum(),
                (squares @ columns[..., None])[..., 0] * rows,
                (rows[:, None] @ squares)[:, 0] * columns,
            )
            before = self._sums.get(name)
            self._sums[name] = found if before is None else tuple(map(torch.add, before, found))  # type: ignore[assignment]

    def means(self, tokens: int) -> dict[str, Sensitivity]:
        """The means over weights and tokens."""
        means = {}
        for name, (total, rows, columns) in self._sums.items():
            height, width = rows.shape[1], columns.shape[1]
            means[name] = Sensitivity(
                float(total) / (max(rows.shape[0] * height * width, 1) * tokens),
                rows.double().cpu() / (max(width, 1) * tokens),
                columns.double().cpu() / (max(height, 1) * tokens),
            )
        return means


View = Callable[[Tensor], Tensor]
"""From a parameter's values to the matrices [E, R, C] of a tensor."""


def owners(model: MoeModel, whole: nn.Module) -> Iterator[tuple[str, dict[str, View]]]:
    """The parameters that hold weights to be packed, and how each packed tensor comes from one."""
    owners: dict[str, dict[str, View]] = {}
    for dense in model.dense:
        for linear in dense.linears:
            owners.setdefault(f"{linear.name}.weight", {})[linear.source] = lambda values: values[None]
    for layer in model.layers:
        form = form_of(whole.get_submodule(layer.name))
        for part in layer.projections:
            if form is not None and part.name in form.places:
                parameter = f"{layer.name}.{form.places[part.name].parameter}"
                owners.setdefault(parameter, {})[part.packed_name] = partial(form.part, part.name)
    parameters = dict(whole.named_parameters())
    yield from ((name, packed) for name, packed in owners.items() if name in parameters)

"""Measures the sensitivity of the loss to errors of each tensor: the diagonal of the Fisher information on a text.

Weight errors d with zero mean that are uncorrelated increase the expected loss by half the sum of F d^2. F is the mean
over tokens of the squared gradient of log p(y), with y drawn from the model's own prediction (Amari 1998; Martens
2014). The gradients at different positions are uncorrelated, because their mean given the preceding tokens is zero. The
expected square of the sum of a window's gradients is therefore the sum of the expected squares of its tokens'
gradients, and one backward pass per window is enough.

Within a tensor, F differs by orders of magnitude between rows and between columns. It is reported for the balanced
matrix (`moepack.solvers.balance`), whose weights W[i, j] / (a[i] b[j]) have F (a[i] b[j])^2. These numbers do not
change if factors are moved between tensors without changing the model's function, such as between the rows of one
matrix and the columns of the next.

The model runs block by block (`moepack.calibration.backward`). A gradient is squared, summed and dropped as soon as it
is complete.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moepack.calibration.backward import Backward
from moepack.calibration.metrics import RowMetric
from moepack.calibration.samples import Samples
from moepack.calibration.skeleton import Skeleton
from moepack.calibration.squares import Sums
from moepack.calibration.stacks import Stack, decoder_blocks
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.classes import building, meta_model
from moepack.checkpoint.dense import EMBEDDING
from moepack.checkpoint.experts import ExpertsForm, form_of
from moepack.decoding.vocabulary import require_known, vocabulary_of
from moepack.memory import PeakMemory, available_bytes
from moepack.progress import Progress, Silent
from moepack.solvers.balance import Balance
from moepack.units import size

__all__ = [
    "LENGTH",
    "TWO_TEXTS",
    "WINDOWS",
    "Sensitivity",
    "fisher",
    "hindrance",
    "needed_bytes",
    "owners",
    "pieces",
    "too_little",
]

WINDOWS, LENGTH = 96, 256
"""Maximum number of pieces of the calibration set that are read, and tokens of each.

With 32 pieces, SmolLM2-135M at 2.5 bits loses +0.571 / +0.310, with 96 pieces +0.473 / +0.288
(docs/methods/sensitivity.md).
"""

ROUND = 32
"""Number of pieces whose hidden states are in memory at a time. The checkpoint is read twice for each round."""

SPARE = 1 / 8
"""Share of the free memory that the hidden states of a round may take if the model runs on a GPU. With few pieces, a
GPU computes a round in less time than its weights are read."""

BLOCK = 2.5
"""Memory for a block's float32 weights, their gradients and temporaries, relative to that of the weights."""

GRADIENT = 1.5
"""Memory for the gradient of the embedding or the head and temporaries, relative to that of the weights."""

LOGITS = 5
"""Memory for the logits of a piece, their gradients and temporaries, relative to that of the logits."""


@dataclass(frozen=True)
class Sensitivity:
    """F of a tensor, in nats per token per squared unit of a weight.

    Attributes:
        mean: mean F of the original, unbalanced weights.
        rows: [E, R] float64, F of the balanced matrices averaged over columns.
        columns: [E, C] float64, F of the balanced matrices averaged over rows.
        metric: [C, C] float32, the metric of the rows of the embedding or the head (`metrics`), for unbalanced weights;
            None for other tensors.
    """

    mean: float
    rows: Tensor
    columns: Tensor
    metric: Tensor | None = None


def fisher(
    checkpoint: Checkpoint,
    model: MoeModel,
    balances: Mapping[str, Balance],
    samples: Samples,
    device: torch.device,
    progress: Progress | None = None,
) -> dict[str, Sensitivity] | None:
    """Measure F of each tensor that can be packed; keys are names of packed tensors.

    Args:
        checkpoint, model: the model to measure.
        balances: balances of the tensors, by name.
        samples: the calibration set.
        device: device on which the model runs.
        progress: receives the number of finished tokens.

    Returns:
        F by tensor name, or None if `hindrance` returns a reason.

    Raises:
        CalibrationError, NonFiniteError: the model computes NaN or infinity; the message names the module.
        TokenError: the embedding has no row for a token of the samples.
        UnsupportedModelError: a block reads more than the outputs of the previous one.
    """
    if hindrance(checkpoint, model, samples, device) is not None:
        return None
    skeleton = Skeleton(checkpoint, model, dtype=torch.float32, device=device, recorded=False)
    ids = pieces(samples.inputs)
    require_known(ids, vocabulary_of(skeleton.module))
    squares = _Squares(dict(owners(model, skeleton.module)), balances, _of_tokens(model))
    shown = progress or Silent()
    stacks = decoder_blocks(model)
    parts = torch.split(ids, _round_size(model, skeleton.module, device))
    rounds = [Backward(skeleton, Stack(skeleton, *stacks, batch=1), part, squares) for part in parts]
    generator = torch.Generator().manual_seed(0)
    shown.prepare("measuring the sensitivity of each tensor on a part of the text")
    shown.start(ids.numel(), 0, "tokens")
    passed = _Shown(shown, ids.numel(), sum(each.work for each in rounds))
    try:
        for each in rounds:
            each.run(generator, passed)
    finally:
        shown.finish()
    return squares.means(ids.numel())


class _Shown:
    """Reports progress in tokens: a pass over part of the weights counts as that part of all tokens."""

    def __init__(self, progress: Progress, tokens: int, work: int) -> None:
        self._progress, self._tokens, self._work = progress, tokens, work
        self._peak, self._place, self._passed, self._done = PeakMemory(), "", 0, 0

    def __call__(self, path: str, weights: int) -> None:
        if path != self._place:
            self._place = path
            self._progress.stage(f"sensitivity: {path}")
        self._passed += weights
        done = self._passed * self._tokens // self._work
        self._progress.advance(done - self._done, self._peak.sample())
        self._done = done


def pieces(inputs: Tensor) -> Tensor:
    """Cut windows [N, L] into pieces of min(LENGTH, L) tokens; return at most `WINDOWS` of them, evenly spaced."""
    length = min(LENGTH, inputs.shape[1])
    cut = inputs[:, : inputs.shape[1] // length * length].reshape(-1, length)
    return cut[torch.linspace(0, len(cut) - 1, min(WINDOWS, len(cut))).long()]


def hindrance(checkpoint: Checkpoint, model: MoeModel, samples: Samples, device: torch.device) -> str | None:
    """Return the reason why a model cannot be measured, with a remedy, as a clause; None if it can be measured.

    Raises:
        UnsupportedModelError: transformers cannot build the model.
    """
    if samples.targets is not None:
        return TWO_TEXTS
    free = available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    return too_little(needed_bytes(checkpoint, model), free, "are free")


TWO_TEXTS = "the measurement supports models that read one text, and this one is an encoder-decoder"
"""The reason for encoder-decoder models, which cannot be measured with any amount of memory."""


def too_little(needed: int, there: int | None, which: str) -> str | None:
    """Return a clause about insufficient memory, with a remedy; None if it suffices or is unknown."""
    if there is None or there >= needed:
        return None
    needs = f"the largest layer with its gradients needs {size(needed)} of memory"
    return f"{needs}, but only {size(there)} {which}; compress on a machine with more memory"


def needed_bytes(checkpoint: Checkpoint, model: MoeModel) -> int:
    """Return the approximate memory of the measurement in bytes.

    It consists of the largest block, or embedding and head if they take more, and of hidden states.

    Raises:
        UnsupportedModelError: transformers cannot build the model.
    """
    with building(checkpoint.path):
        whole = meta_model(checkpoint.path, checkpoint.config)
    owner, blocks = decoder_blocks(model)
    stack, config = whole.get_submodule(owner), whole.config.get_text_config(decoder=True)
    sizes = [_weights(block) for block in getattr(stack, blocks)]
    embedding = _weights(stack) - sum(sizes)
    head = _weights(whole.get_output_embeddings(), but=stack)
    ends = embedding + head + GRADIENT * max(embedding, head) + LOGITS * LENGTH * int(config.vocab_size)
    return math.ceil(4 * max(BLOCK * max(sizes), ends) + ROUND * _states(whole, len(sizes)))


def _states(whole: nn.Module, blocks: int) -> int:
    """Return the bytes of the hidden states of a piece."""
    config = whole.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    return 4 * LENGTH * int(config.hidden_size) * int(getattr(config, "hc_mult", 1)) * (blocks + 3)


def _round_size(model: MoeModel, whole: nn.Module, device: torch.device) -> int:
    """Return the number of pieces of a round: `ROUND`, or more on a GPU if there is memory for them."""
    free = available_bytes()
    if device.type == "cpu" or free is None:
        return ROUND
    owner, blocks = decoder_blocks(model)
    states = _states(whole, len(getattr(whole.get_submodule(owner), blocks)))
    return max(ROUND, int(SPARE * free) // states)


def _weights(module: nn.Module | None, but: nn.Module | None = None) -> int:
    """Return the number of weights of a module that it does not share with another one."""
    others = set() if but is None else set(map(id, but.parameters()))
    return 0 if module is None else sum(own.numel() for own in module.parameters() if id(own) not in others)


class _Squares:
    """Sums of squared gradients of each packed tensor. A parameter may contain several packed tensors.

    `tokens` are the packed tensors whose rows are tokens, by parameter.
    """

    def __init__(
        self,
        owners: Mapping[str, Mapping[str, View]],
        balances: Mapping[str, Balance],
        tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._owners, self._balances, self._tokens = owners, balances, tokens or {}
        self._sums: dict[str, Sums] = {}
        self._metrics: dict[str, RowMetric] = {}

    def wants(self, name: str) -> bool:
        """Return whether a parameter contains weights to pack."""
        return name in self._owners

    def gradient(self, name: str, gradient: Tensor) -> None:
        """Add a gradient of a parameter."""
        for packed, view in self._owners[name].items():
            self._of(packed, gradient.device).add(view(gradient))

    def factors(self, name: str, matrix: int, left: Tensor, right: Tensor) -> None:
        """Add the gradient left^T right of a matrix of a parameter."""
        for packed, view in self._owners[name].items():
            sums = self._of(packed, left.device)
            if matrix < len(sums.rows):
                sums.add_factors(matrix, *view.factors(left, right))

    def stack(self, name: str, left: Tensor, right: Tensor) -> None:
        """Add the gradients left^T right of all matrices of a parameter."""
        for packed, view in self._owners[name].items():
            sums = self._of(packed, left.device)
            sums.add_stack(*(each[: len(sums.rows)] for each in view.factors(left, right)))

    def rows(self, name: str, rows: Tensor, gradients: Tensor) -> None:
        """Add the gradients of different rows of a parameter."""
        for packed in self._owners[name]:
            self._of(packed, gradients.device).add_rows(rows, gradients)

    def observe(self, name: str, module: nn.Module) -> AbstractContextManager[None]:
        """Add to the metric of the rows of the embedding or the head; other modules are not observed."""
        if name not in self._tokens or not isinstance(module, nn.Linear | nn.Embedding):
            return nullcontext()
        return self._metrics.setdefault(self._tokens[name], RowMetric(module.weight)).observing(module)

    def _of(self, packed: str, device: torch.device) -> Sums:
        if packed not in self._sums:
            balance = self._balances[packed]
            self._sums[packed] = Sums(*(each.to(device).square() for each in (balance.rows, balance.columns)))
        return self._sums[packed]

    def means(self, tokens: int) -> dict[str, Sensitivity]:
        """Return the means over weights and tokens, by tensor name."""
        means = {}
        for name, sums in self._sums.items():
            height, width = sums.by_row.shape[1], sums.by_column.shape[1]
            means[name] = Sensitivity(
                float(sums.total) / (max(sums.by_row.shape[0] * height * width, 1) * tokens),
                (sums.by_row * sums.rows).double().cpu() / (max(width, 1) * tokens),
                (sums.by_column * sums.columns).double().cpu() / (max(height, 1) * tokens),
                self._metrics[name].mean(tokens) if name in self._metrics else None,
            )
        return means


@dataclass(frozen=True)
class View:
    """Where a packed tensor is in a parameter: a projection of an experts module, or the whole of a linear layer."""

    form: ExpertsForm | None = None
    projection: str = ""

    def __call__(self, values: Tensor) -> Tensor:
        """Return the tensor's matrices [E, R, C] from a parameter's values."""
        return values[None] if self.form is None else self.form.part(self.projection, values)

    def factors(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Convert factors of the parameter's gradient to factors [..., n, R] and [..., n, C] of the tensor's."""
        if self.form is None:
            return left, right
        place = self.form.places[self.projection]
        return (right[..., place.rows], left) if place.transposed else (left[..., place.rows], right)


def _of_tokens(model: MoeModel) -> dict[str, str]:
    """Return the tensors whose rows are tokens, by parameter."""
    linears = (linear for dense in model.dense for linear in dense.linears if linear.role in (EMBEDDING, "head"))
    return {f"{linear.name}.weight": linear.source for linear in linears}


def owners(model: MoeModel, whole: nn.Module) -> Iterator[tuple[str, dict[str, View]]]:
    """Yield the parameters that contain weights to pack, with the view of each packed tensor."""
    owners: dict[str, dict[str, View]] = {}
    for dense in model.dense:
        for linear in dense.linears:
            owners.setdefault(f"{linear.name}.weight", {})[linear.source] = View()
    for layer in model.layers:
        form = form_of(whole.get_submodule(layer.name))
        for part in layer.projections:
            if form is not None and part.name in form.places:
                parameter = f"{layer.name}.{form.places[part.name].parameter}"
                owners.setdefault(parameter, {})[part.packed_name] = View(form, part.name)
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    yield from ((name, packed) for name, packed in owners.items() if name in parameters)

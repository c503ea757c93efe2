"""Gradient steps on all centroids, scales and gains at once (CodeQuant, equation 6, over the whole model).

The paper adds lambda * KL(router) to the output error of the layer behind the router, whose weights the router does not
depend on: that term has no gradient. Here a step goes through the whole model, so each router's divergence has one with
respect to all centroids before it; and the output error is that of the model, the divergence of its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from moepack.errors import CalibrationError, UnsupportedModelError
from moepack.tuning.gains import gain_of, thaw_gains
from moepack.tuning.modules import thaw
from moepack.tuning.tensors import Books, TunedTensor

__all__ = ["Objective", "TuneSettings", "Tuned", "listening", "routers", "tune_model"]

PACE = 8.0
"""Steps of scales and gains over those of centroids. On SmolLM2-135M at 3 bits 4 to 8 times 5e-4 gain most."""

CHECK = 20
"""Steps between looks at the samples that are held out."""


@dataclass(frozen=True)
class TuneSettings:
    """How a model is fine-tuned.

    Attributes:
        steps: of Adam.
        rate: its learning rate, relative to the largest centroid of a codebook; scales and gains take `PACE` times as
            much, relative to themselves. It falls to a tenth of itself.
        router_weight: lambda, what a router's divergence counts beside that of the logits.
        batch: samples a step.
        seed: of the order of samples.
    """

    steps: int = 200
    rate: float = 5e-4
    router_weight: float = 1.0
    batch: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1 or not self.rate > 0 or not self.router_weight >= 0:
            raise ValueError("steps, batch and rate must be positive, router_weight not negative")


class Objective(NamedTuple):
    """Divergences from the original model, nats a token.

    Attributes:
        logits: KL(original || packed) of the predictions.
        routers: the same of the routers, the mean over layers.
    """

    logits: float
    routers: float

    def total(self, weight: float) -> float:
        """The objective."""
        return self.logits + weight * self.routers


class Tuned(NamedTuple):
    """What became of a model.

    Attributes:
        tensors: what was fine-tuned by module and projection, at the best iterate.
        gains: gains of norms, as they are stored, by their names in the model.
        before, after: of the samples that are held out.
    """

    tensors: dict[str, TunedTensor]
    gains: dict[str, Tensor]
    before: Objective
    after: Objective


def tune_model(
    packed: Any,
    original: Any,
    samples: Tensor,
    settings: TuneSettings,
    device: torch.device,
    advance: Callable[[int], None] = lambda steps: None,
    stored: Mapping[str, torch.dtype] | None = None,
) -> Tuned:
    """Fine-tune a loaded packed model; its modules are replaced by ones with gradients.

    Args:
        packed: as `moepack.load` gives it, in float32.
        original: the model that it was made of, in float32.
        samples: [N, L] int64 token ids, two at least; an eighth of them is held out.
        settings: see `TuneSettings`.
        device: where everything runs; both models must fit there, with gradients.
        advance: is told the steps that are done.
        stored: the types of gains of norms that may change, by their names in the model; none for a model whose
            norms stay.

    Returns:
        The tensors of the best iterate by the held-out objective, which may be those that were given.

    Raises:
        CalibrationError: there is one sample only, or the loss is not finite.
        UnsupportedModelError: the model cannot be fine-tuned.
    """
    if len(samples) < 2:
        raise CalibrationError("fine-tuning needs two samples at least, one of them to hold out")
    tensors = thaw(packed)
    gains = thaw_gains(packed, stored or {})
    student, teacher = packed.to(device).eval(), original.to(device).eval().requires_grad_(False)
    if device.type != "cpu" and hasattr(teacher, "set_experts_implementation"):
        # Grouped products of float32 are not on every device.
        teacher.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(settings.seed)
    samples = samples[torch.randperm(len(samples), generator=generator)]
    share = max(1, len(samples) // 8)
    with listening(student) as heard, listening(teacher) as expected:

        def divergences(ids: Tensor) -> tuple[Tensor, Tensor]:
            heard.clear()
            expected.clear()
            with torch.no_grad():
                truth = teacher(input_ids=ids.to(device), use_cache=False).logits
            found = student(input_ids=ids.to(device), use_cache=False).logits
            routers = [_divergence(truth, found) for truth, found in zip(expected, heard, strict=True)]
            return _divergence(truth, found), torch.stack(routers).mean()

        batches = _batches(samples[share:], settings, generator)
        books = [tensor for tensor in tensors.values() if isinstance(tensor, Books)]
        others = [tensor for tensor in (*tensors.values(), *gains.values()) if tensor not in books]
        paced = [(1.0, _parameters(books)), (PACE, _parameters(others))]
        before, after = _descend(paced, divergences, batches, samples[:share], settings, advance)
    return Tuned(tensors, {name: gain_of(module) for name, module in gains.items()}, before, after)


def _parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def _batches(samples: Tensor, settings: TuneSettings, generator: torch.Generator) -> Iterator[Tensor]:
    """A batch for each step: all samples in random order, then in another."""
    order: list[int] = []
    for _ in range(settings.steps):
        while len(order) < settings.batch:
            order += torch.randperm(len(samples), generator=generator).tolist()
        yield samples[order[: settings.batch]]
        order = order[settings.batch :]


def _descend(
    paced: Sequence[tuple[float, list[nn.Parameter]]],
    divergences: Callable[[Tensor], tuple[Tensor, Tensor]],
    batches: Iterator[Tensor],
    held: Tensor,
    settings: TuneSettings,
    advance: Callable[[int], None],
) -> tuple[Objective, Objective]:
    """Leave in the parameters, which come with what multiplies their rate, the iterate of the least held-out objective;
    returns the objective of the start and its own."""
    moves = [move for _, of_pace in paced for move in of_pace]
    groups = [{"params": of_pace, "pace": pace} for pace, of_pace in paced]
    optimizer = torch.optim.Adam(groups, lr=settings.rate, betas=(0.9, 0.99))
    before = least = _mean(divergences, held, settings.batch)
    best = [move.detach().clone() for move in moves]
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * group["pace"] * (1 - 0.9 * step / settings.steps)
        logits, routers = divergences(batch)
        loss = logits + settings.router_weight * routers
        if not bool(loss.isfinite()):
            raise CalibrationError("the loss of the packed model is not finite")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        advance(1)
        if step % CHECK == CHECK - 1 or step == settings.steps - 1:
            found = _mean(divergences, held, settings.batch)
            if found.total(settings.router_weight) < least.total(settings.router_weight):
                least, best = found, [move.detach().clone() for move in moves]
    with torch.no_grad():
        for move, kept in zip(moves, best, strict=True):
            move.copy_(kept)
    return before, least


def _divergence(expected: Tensor, found: Tensor) -> Tensor:
    """KL(expected || found) of logits [..., V], the mean over tokens."""
    log_p, log_q = (functional.log_softmax(part.float().flatten(0, -2), -1) for part in (expected, found))
    return functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


@torch.no_grad()
def _mean(divergences: Callable[[Tensor], tuple[Tensor, Tensor]], samples: Tensor, batch: int) -> Objective:
    sums = [0.0, 0.0]
    for first in range(0, len(samples), batch):
        part = samples[first : first + batch]
        for position, value in enumerate(divergences(part)):
            sums[position] += float(value) * len(part)
    return Objective(sums[0] / len(samples), sums[1] / len(samples))


@contextmanager
def listening(model: nn.Module) -> Iterator[list[Tensor]]:
    """The logits [T, E] of a model's routers as they run, layer by layer, in a list that its user empties."""
    heard: list[Tensor] = []

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        heard.append(functional.linear(given[0].float().flatten(0, -2), weight.float()))

    hooks = [router.register_forward_pre_hook(note) for router in routers(model)]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def routers(model: nn.Module) -> list[nn.Module]:
    """The routers of a model, packed or not: beside its experts, with a row for each of them.

    Raises:
        UnsupportedModelError: a layer of experts has none.
    """
    found = []
    for path, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        if path.rsplit(".", 1)[-1] != "experts" or count is None:
            continue
        parent = model.get_submodule(path.rsplit(".", 1)[0])
        beside = [child for child in parent.children() if _rows(child) == count]
        if len(beside) != 1:
            raise UnsupportedModelError(f"do not know the router of '{path}'")
        found.append(beside[0])
    return found


def _rows(module: nn.Module) -> int:
    weight = getattr(module, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.ndim == 2 else -1

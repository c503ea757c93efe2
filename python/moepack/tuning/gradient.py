"""Gradient steps on all centroids, scales and gains at once (CodeQuant, equation 6, over the whole model).

The paper adds lambda * KL(router) to the output error of the layer behind the router. The router does not depend on
that layer's weights, so the term has no gradient. Here a step goes through the whole model, so each router's divergence
has a gradient with respect to all earlier centroids; and the output error is that of the model, the divergence of its
logits.
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

PACE = 4.0
"""Step size of scales and gains relative to that of centroids (docs/methods/sensitivity.md, "Fine-tuning")."""

CHECK = 20
"""Steps between evaluations of the held-out samples."""


@dataclass(frozen=True)
class TuneSettings:
    """Settings of the fine-tuning.

    Attributes:
        steps: number of Adam steps.
        rate: learning rate relative to the largest centroid of a codebook. Scales and gains use `PACE` times this,
            relative to their initial values. It decays to a tenth.
        router_weight: lambda, the weight of a router's divergence relative to that of the logits. Routers of a pruned
            model, which have fewer rows, are not compared.
        batch: samples per step.
        seed: seed of the order of samples.
    """

    steps: int = 200
    rate: float = 5e-4
    router_weight: float = 1.0
    batch: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1 or not self.rate > 0 or not self.router_weight >= 0:
            raise ValueError("steps, batch and rate must be positive, and router_weight must not be negative")


class Objective(NamedTuple):
    """Divergences from the original model in nats per token.

    Attributes:
        logits: KL(original || packed) of the predictions.
        routers: the same for the routers, averaged over layers.
    """

    logits: float
    routers: float

    def total(self, weight: float) -> float:
        """Return the objective."""
        return self.logits + weight * self.routers


class Tuned(NamedTuple):
    """The result of fine-tuning.

    Attributes:
        tensors: the fine-tuned tensors of the best iterate, by module and projection.
        gains: gains of norms as stored, by their names in the model.
        before, after: objective on the held-out samples.
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
        packed: a model from `moepack.load`, in float32.
        original: the original model, in float32.
        samples: [N, L] int64 token ids, N >= 2; an eighth of them is held out.
        settings: see `TuneSettings`.
        device: where everything runs; both models must fit, with gradients.
        advance: callback for the number of finished steps.
        stored: stored dtypes of the norm gains that may change, by their names in the model; empty to keep all norms.

    Returns:
        The tensors of the best iterate by the held-out objective, which may be the initial one.

    Raises:
        CalibrationError: there is only one sample, or the loss is not finite.
        UnsupportedModelError: the model cannot be fine-tuned.
    """
    if len(samples) < 2:
        raise CalibrationError("fine-tuning requires at least two samples, one of them held out")
    tensors = thaw(packed)
    gains = thaw_gains(packed, stored or {})
    student, teacher = packed.to(device).eval(), original.to(device).eval().requires_grad_(False)
    if device.type != "cpu" and hasattr(teacher, "set_experts_implementation"):
        # Some devices lack grouped products of float32.
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
            if truth.shape != found.shape:
                message = f"the original predicts {truth.shape[-1]} tokens, the packed model {found.shape[-1]}"
                raise UnsupportedModelError(message)
            alike = [one.shape for one in expected] == [other.shape for other in heard]
            pairs = zip(expected, heard, strict=True) if alike else ()  # a pruned model has fewer experts
            routers = [_divergence(*pair) for pair in pairs] or [truth.new_zeros(())]
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
    """Yield a batch for each step: all samples in random order, then reshuffled."""
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
    """Optimize the parameters and leave the iterate with the least held-out objective in them.

    `paced` pairs rate multipliers with parameters. Returns the held-out objectives of the start and of the best
    iterate.
    """
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
    """Return KL(expected || found) of logits [..., V], averaged over tokens."""
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
    """Collect the logits [T, E] of a model's routers as they run, layer by layer, in a list that the caller clears."""
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
    """Return the routers of a model, packed or not: siblings of its experts with one row per expert.

    Raises:
        UnsupportedModelError: a layer of experts has no router.
    """
    found = []
    for path, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        if path.rsplit(".", 1)[-1] != "experts" or count is None:
            continue
        parent = model.get_submodule(path.rsplit(".", 1)[0])
        beside = [child for child in parent.children() if _rows(child) == count]
        if len(beside) != 1:
            raise UnsupportedModelError(f"the router of '{path}' is unknown")
        found.append(beside[0])
    return found


def _rows(module: nn.Module) -> int:
    weight = getattr(module, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.ndim == 2 else -1

"""Leaves experts out of a model before it is packed: those that matter least on a text, or merged into similar ones.

An expert matters as much as its output: the mean over the tokens that choose it of the router's weight times the norm
of the expert's output (REAP, arXiv 2510.13999, equation 9). An expert that no token chooses goes first. The original
model runs over the text once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moepack.calibration import CalibrationRequest, CalibrationSettings, Calibrator
from moepack.calibration.samples import Samples
from moepack.calibration.stage import Stage
from moepack.checkpoint import Checkpoint, MoeModel, describe
from moepack.checkpoint.names import check_tensors
from moepack.checkpoint.pruned import Group, PrunedCheckpoint, refuse_unprunable, remaining, routing_groups
from moepack.errors import UnsupportedModelError
from moepack.methods import Method
from moepack.textfile import BUILT_IN

__all__ = ["AUTO", "DROP", "MERGE", "WAYS", "Pruning", "parse_share", "pruned", "request_of"]

AUTO = "auto"
DROP, MERGE = "drop", "merge"
WAYS = (DROP, MERGE)

SAMPLES, LENGTH = 128, 512
"""Default number and length of windows of the text."""


@dataclass(frozen=True)
class Pruning:
    """What is left out.

    Attributes:
        share: the share of each layer's experts, between 0 and 1; None leaves the choice to `pipeline.share`.
        by: "drop", or "merge" to average each with the remaining expert whose router row is nearest.
    """

    share: float | None
    by: str = DROP

    def __post_init__(self) -> None:
        if self.by not in WAYS:
            raise ValueError(f"prune_by must be {' or '.join(WAYS)}, not '{self.by}'")

    @classmethod
    def of(cls, share: str | float | None, by: str | None, known: Pruning | None = None) -> Pruning | None:
        """Return a pruning. Settings that are None are taken from `known`; without any share, the result is None.

        The share "auto" is chosen later.

        Raises:
            ValueError: a setting is invalid.
        """
        if share is None and known is None:
            if by is not None:
                raise ValueError("prune_by requires prune")
            return None
        way = by or (known.by if known is not None else DROP)
        if share is None:
            assert known is not None
            return replace(known, by=way)
        return cls(None if share == AUTO else parse_share(share), way)


def parse_share(given: str | float) -> float:
    """Return a share, given as 0.25 or "25%".

    Raises:
        ValueError: it is no share between 0 and 1.
    """
    text = str(given).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ValueError(f"prune must be auto or a share of the experts such as 25% or 0.25, not '{given}'")
    return share


@dataclass(frozen=True)
class Importance:
    """What a text says about the experts of a layer.

    Attributes:
        scores: [E] float64, mean of weight times output norm; 0 for experts without tokens.
        counts: [E] int64, tokens that chose each expert.
    """

    scores: Tensor
    counts: Tensor


def pruned(
    checkpoint: Checkpoint, pruning: Pruning, method: Method, samples: Samples | None = None
) -> PrunedCheckpoint:
    """Return a checkpoint without the experts that matter least on a text.

    Args:
        checkpoint: the checkpoint.
        pruning: what is left out; its share is known.
        method: gives the text and the device; the built-in text if it reads none.
        samples: a part of the text to read; None reads all of it.

    Raises:
        UnsupportedModelError: the model cannot be pruned, or too few experts would remain.
        CalibrationError: the text is unusable.
    """
    assert pruning.share is not None
    model, request = describe(checkpoint), request_of(method)
    refuse_unprunable(checkpoint, model)
    count = remaining(checkpoint.config, model, pruning.share)
    groups = routing_groups(checkpoint.config)
    _changed(checkpoint, model, {layer.name: [((e, 1.0),) for e in range(count)] for layer in model.layers}, count)
    known = importance(checkpoint, model, samples or request.load(checkpoint), request.settings)
    chosen = {
        layer.name: _groups(
            known[layer.name], _router_rows(checkpoint, layer.router, layer.experts), count, groups, pruning.by
        )
        for layer in model.layers
    }
    found = _changed(checkpoint, model, chosen, count)
    way = "were left out" if pruning.by == DROP else "were merged into others"
    unread = sum(int((own.counts == 0).sum()) for own in known.values())
    note = f"{model.layers[0].experts - count} of {model.layers[0].experts} experts of each layer {way}."
    if unread:
        note += f" The text did not reach {unread} of {len(known) * model.layers[0].experts} experts."
    found.notes = (*found.notes, note)
    return found


def _changed(
    checkpoint: Checkpoint, model: MoeModel, groups: Mapping[str, Sequence[Group]], count: int
) -> PrunedCheckpoint:
    """Apply a pruning, and check the result against transformers' model; raises UnsupportedModelError."""
    found = PrunedCheckpoint(checkpoint, model, groups)
    after = describe(found)
    if any(layer.experts != count for layer in after.layers):
        raise UnsupportedModelError("experts cannot be left out: the model does not follow config.json")
    check_tensors(found, [layer.name for layer in after.layers])
    return found


def request_of(method: Method) -> CalibrationRequest:
    """Return the text by which experts are chosen: that of a method, or the built-in text."""
    source = getattr(method, "calibration", None) or BUILT_IN
    samples, length = getattr(method, "samples", SAMPLES), getattr(method, "sequence_length", LENGTH)
    settings = CalibrationSettings(
        routing="compressed", group=getattr(method, "group", 16), device=torch.device(getattr(method, "device", "cpu"))
    )
    return CalibrationRequest(source, samples, length, settings)


@torch.no_grad()
def importance(
    checkpoint: Checkpoint, model: MoeModel, samples: Samples, settings: CalibrationSettings
) -> dict[str, Importance]:
    """Run the original model over a text; return the importance of the experts, by layer."""
    found = {}
    for run in Calibrator(checkpoint, model, samples, settings).layers():
        layer = next(layer for layer in model.layers if layer.name == run.layer.name)
        last = layer.projections[-1].name
        scores = torch.zeros(layer.experts, dtype=torch.float64)
        for stage in run:
            if last in stage.tensors:
                scores[stage.experts.start : stage.experts.stop] = _scores(stage, last)
            run.answer(stage.finite().weights)
        assert run.tokens is not None
        found[layer.name] = Importance(scores, run.tokens.clone())
    return found


def _scores(stage: Stage, last: str) -> Tensor:
    """Return the mean of weight times output norm of each expert of a stage, [G] float64."""
    assert stage.inputs is not None
    means = []
    for position in range(len(stage.experts)):
        total, tokens = 0.0, 0
        for x, share in zip(stage.inputs.pieces(position), stage.inputs.weights(position), strict=True):
            norms = (x.float() @ stage.weights[last][position].T).norm(dim=1)
            total += float((norms * share.to(norms.device).float().abs()).sum(dtype=torch.float64))
            tokens += len(norms)
        means.append(total / max(tokens, 1))
    return torch.tensor(means, dtype=torch.float64)


def _router_rows(checkpoint: Checkpoint, router: Sequence[str], experts: int) -> Tensor:
    """Return the row of each expert in the router's matrix, [E, C] float32."""
    matrices = [checkpoint.tensor(name) for name in router if len(checkpoint.info(name).shape) == 2]
    rows = next((each for each in matrices if len(each) == experts), None)
    return torch.eye(experts) if rows is None else rows.float()


def _groups(known: Importance, rows: Tensor, count: int, groups: int, by: str) -> list[Group]:
    """Return the groups of the remaining experts: the most important ones, equally many of each routing group."""
    experts = len(known.scores)
    kept: list[int] = []
    for first in range(0, experts, experts // groups):
        own = sorted(range(first, first + experts // groups), key=lambda expert: (-float(known.scores[expert]), expert))
        kept += sorted(own[: count // groups])
    members: dict[int, list[int]] = {expert: [expert] for expert in kept}
    if by == MERGE:
        directions = torch.nn.functional.normalize(rows, dim=1)
        likeness = directions @ directions[kept].T
        for expert in set(range(experts)) - set(kept):
            members[kept[int(likeness[expert].argmax())]].append(expert)
    return [_weighed(members[expert], known.counts) for expert in kept]


def _weighed(members: Sequence[int], counts: Tensor) -> Group:
    """Return a group whose members are weighted by the tokens that chose them, the kept expert first."""
    own = [float(counts[member]) for member in members]
    total = sum(own)
    shares = [each / total for each in own] if total else [1.0, *(0.0 for _ in own[1:])]
    return tuple(zip(members, shares, strict=True))

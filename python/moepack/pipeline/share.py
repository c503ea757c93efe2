"""Chooses the share of experts that a model is packed without: `--prune auto`.

At a given size, fewer experts have more bits. Each share is compared with packing all experts in the same bytes. What
the missing experts cost is measured: one half of the calibration windows chooses them, the unpacked models with and
without them predict the other half, and the standard error of the mean difference is added. What the bits save is the
difference of the lower bounds of the plans' expected losses. Both make it harder for a share to win.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor

from moepack.calibration.samples import decoder_samples
from moepack.checkpoint import Checkpoint
from moepack.errors import UnsupportedModelError
from moepack.evaluation.streaming import StreamedDecoder
from moepack.methods import Auto, Method
from moepack.pipeline.estimate import estimate
from moepack.pipeline.pruning import Pruning, pruned, request_of
from moepack.pipeline.source import Source
from moepack.progress import Progress, Silent
from moepack.units import nats

__all__ = ["SHARES", "leave_out"]

SHARES = (1 / 8, 1 / 4)
"""Shares that are tried, ascending, until one does not lower the loss further."""

MEASURED = 48
"""Maximum number of windows that measure a share. With 512 tokens each, the standard error is a few thousandths."""

LEAST = 4
"""Minimum number of windows of the text: two to choose the experts, two to measure."""


@dataclass(frozen=True)
class Trial:
    """The expected loss increase of a model that is packed without a share of its experts, in nats per token.

    Attributes:
        share: the share.
        missing: the increase without the experts, unpacked: mean over windows plus its standard error, at least 0.
        rounding: the increase by packing, the lower bound of the plan.
    """

    share: float
    missing: float
    rounding: float

    @property
    def total(self) -> float:
        """Both increases."""
        return self.missing + self.rounding


def leave_out(
    source: Source,
    pruning: Pruning | None,
    method: Method,
    target: Path,
    progress: Progress | None = None,
    mtp_bits: int | None = None,
) -> Method:
    """Leave experts out of a source, once; choose their share if it is not given.

    Args:
        source: the source; its checkpoint changes.
        pruning: what is left out; None keeps all experts.
        method: the method that packs the model.
        target, mtp_bits: as for `estimate`.
        progress: shows what is done.

    Returns:
        The method. If the share was chosen, its size is that of the model with all experts, in bytes.

    Raises:
        UnsupportedModelError, CalibrationError: as for `pruned`, if the share is given.
        ValueError: a share cannot be chosen, because the method expects no loss, or the text is too short.
    """
    if pruning is None or source.pruning is not None:
        return method
    shown = progress or Silent()
    if pruning.share is None:
        method, pruning = _chosen(source, pruning, method, target, shown, mtp_bits)
    if pruning is not None:
        shown.prepare("choosing the experts to leave out")
        source.prune(pruning, method)
    return method


def _chosen(
    source: Source, pruning: Pruning, method: Method, target: Path, progress: Progress, mtp_bits: int | None
) -> tuple[Method, Pruning | None]:
    """Return the method with a fixed size, and the pruning with the least expected loss; None keeps all experts."""
    checkpoint, text = source.checkpoint, _Text.of(source.checkpoint, method)
    plan = estimate(source, target, method, progress=progress, mtp_bits=mtp_bits).plan
    if not isinstance(method, Auto) or plan is None or plan.loss is None or plan.goal is None:
        raise ValueError(
            "prune='auto' compares expected losses, which require the method auto and a calibration text that the "
            "model can read; give a share of the experts instead"
        )
    method = replace(method, size=plan.goal.nbytes, bits_per_weight=None, ratio=None)
    best, said = Trial(0.0, 0.0, plan.loss[0]), list[str]()
    for share in SHARES:
        progress.prepare(f"trying to leave out {100 * share:g}% of the experts")
        try:
            changed = pruned(checkpoint, Pruning(share, pruning.by), method, decoder_samples(text.choosing))
        except UnsupportedModelError as error:
            said.append(f"{100 * share:g}% of the experts cannot be left out: {error}.")
            continue
        trial = Source(source.model, changed, None)
        trial.pruning = Pruning(share, pruning.by)
        expected = estimate(trial, target, method, progress=progress, mtp_bits=mtp_bits).plan
        assert expected is not None and expected.loss is not None
        found = Trial(share, text.increase(changed), expected.loss[0])
        said.append(
            f"Without {100 * share:g}% of the experts, the loss rises by {nats(found.missing)} on held-out windows of "
            f"the text, and packing costs at least {nats(found.rounding)} instead of {nats(plan.loss[0])}."
        )
        if found.total >= best.total:
            break
        best = found
    checkpoint.notes = (*checkpoint.notes, *said, *(() if best.share else ("All experts stay.",)))
    return method, Pruning(best.share, pruning.by) if best.share else None


class _Text:
    """The windows of a text: one half chooses experts, the other measures models.

    Attributes:
        choosing: [N, L] int64, the windows that choose.
    """

    def __init__(self, original: Checkpoint, choosing: Tensor, measuring: Tensor, device: str) -> None:
        self.choosing, self._measuring, self._device = choosing, measuring, device
        self._original = original

    @classmethod
    def of(cls, checkpoint: Checkpoint, method: Method) -> _Text:
        """Return the text of a method; raises ValueError if it is too short."""
        windows = request_of(method).load(checkpoint).inputs
        if len(windows) < LEAST:
            raise ValueError(f"prune='auto' needs at least {LEAST} windows of text, not {len(windows)}")
        return cls(checkpoint, windows[::2], windows[1::2][:MEASURED], getattr(method, "device", "cpu"))

    @cached_property
    def _before(self) -> Tensor:
        return self._losses(self._original)

    def increase(self, changed: Checkpoint) -> float:
        """Return the loss increase of a changed model plus its standard error, at least 0, in nats per token."""
        apart = self._losses(changed) - self._before
        return max(0.0, float(apart.mean() + apart.std() / len(apart) ** 0.5))

    def _losses(self, checkpoint: Checkpoint) -> Tensor:
        """Return the mean loss of each measuring window, [M] float64."""
        found, left = list[Tensor](), self._measuring
        with TemporaryDirectory() as folder:
            decoder = StreamedDecoder(checkpoint, left, torch.float32, Path(folder), self._device)
            for logits in decoder.logits(lambda *_: None):
                ids, left = left[: len(logits), 1:].to(logits.device), left[len(logits) :]
                own = F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), ids, reduction="none")
                found.append(own.double().mean(1).cpu())
        return torch.cat(found)

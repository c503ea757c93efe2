"""Measures loss and perplexity of a model, and its divergence from a recorded reference."""

import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from moepack.checkpoint.reader import read_config
from moepack.decoding.vocabulary import require_known, vocabulary_of
from moepack.errors import NonFiniteError, ReferenceMismatchError
from moepack.evaluation.models import Progress, Source, open_source, run, tokenizer_of
from moepack.evaluation.reference import Reference, record_reference
from moepack.evaluation.windows import batches, read_windows
from moepack.integrations.options import LoadOptions
from moepack.memory import PeakMemory
from moepack.precision import single_precision

__all__ = ["EvaluationReport", "evaluate"]


@dataclass(frozen=True)
class EvaluationReport:
    """The result of `evaluate`.

    Attributes:
        tokens: number of predicted tokens.
        loss: mean negative log-likelihood, in nats per token.
        perplexity: exp(loss).
        seconds: time in the models, without tokenization.
        reference_loss, reference_perplexity: the same for the reference; None without one.
        kl: mean KL divergence KL(reference || model), in nats per token; None without a reference.
        top1_agreement: fraction of tokens for which both rank the same token first; None without a reference.
        peak_memory: peak anonymous memory of the process in bytes, without mapped weights.
    """

    tokens: int
    loss: float
    perplexity: float
    seconds: float
    reference_loss: float | None = None
    reference_perplexity: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    peak_memory: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the measured figures by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@torch.inference_mode()
@single_precision()
def evaluate(
    model: Source,
    text: str | PathLike[str],
    chars: int = 250_000,
    reference: Source | Reference | None = None,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str = torch.float32,
    mode: str | None = None,
    progress: Progress | None = None,
    save_reference: str | PathLike[str] | None = None,
    **loading: Any,
) -> EvaluationReport:
    """Measure a model's loss on a text.

    Args:
        model: a directory or Hub id, packed or not; or a loaded model on any device, which needs `tokenizer`.
        text: the text file, UTF-8.
        chars: number of characters to use.
        reference: what to compare with: a directory, Hub id or loaded model with the same vocabulary, a recorded
            reference, or its file (`record_reference`). A model loaded here is freed before `model` is loaded.
        tokenizer: the tokenizer; None loads that of the `model` directory.
        dtype: dtype of models loaded here.
        mode: compute mode of a packed `model` loaded here; see `moepack.load`.
        progress: called after each batch with (windows done, total windows, mean loss so far). The loss is NaN while
            the reference runs.
        save_reference: save the reference's predictions to this file.
        **loading: the other fields of `LoadOptions`, for a `model` loaded here. `device`, `device_map` and
            `host_memory` also apply to the reference.

    Raises:
        LoadError: a model or tokenizer cannot be loaded.
        NonFiniteError: the logits or the loss of a model are not finite; the message names the layer or the token.
        TokenError: a model's embedding has no row for a token of the text.
        ReferenceMismatchError: the recorded reference belongs to another text, tokenizer or kind of model.
        TextError: the text cannot be read, or is not text.
        ValueError: the text is shorter than one window, or reference and model differ in vocabulary or kind.
    """
    tokenizer = tokenizer_of(model, tokenizer)
    own = LoadOptions(dtype=dtype, mode=mode, **loading)
    places = {key: value for key in ("device", "device_map") if (value := getattr(own, key)) is not None}
    options = {"tokenizer": tokenizer, "dtype": dtype, "progress": progress, **places}
    if own.host_cap is not None:
        options["memory"] = own.host_cap
    _check_vocabularies(model, reference)
    known = None if reference is None else _reference(reference, text, chars, save_reference, options)
    loaded = open_source(model, own)
    windows = read_windows(Path(text), chars, tokenizer)
    require_known(torch.from_numpy(windows.ids), vocabulary_of(loaded), tokenizer, text)
    if known is not None:
        known.check(windows, loaded.config.is_encoder_decoder)
    totals, peak = _Totals(known), PeakMemory()
    start = time.perf_counter()
    for done, inputs, targets in batches(loaded.config, windows, tokenizer):
        totals.add(run(loaded, inputs), targets)
        peak.sample()
        if progress is not None:
            progress(done, len(windows), totals.loss / totals.tokens)
    seconds = time.perf_counter() - start
    return replace(totals.report(seconds), peak_memory=max(peak.bytes, 0 if known is None else known.peak_memory))


def _check_vocabularies(model: Source, reference: Source | Reference | None) -> None:
    """Compare the sizes of the vocabularies of two directories before either is loaded."""
    places = [Path(each) for each in (model, reference) if isinstance(each, str | PathLike) and Path(each).is_dir()]
    sizes = [_vocabulary(place) for place in places]
    if len(sizes) == 2 and None not in sizes and sizes[0] != sizes[1]:
        message = f"has a vocabulary of {sizes[1]} tokens, but {places[0]} has {sizes[0]}"
        raise ReferenceMismatchError(message, file=places[1])


def _vocabulary(directory: Path) -> int | None:
    config = read_config(directory)
    inner = config.get("text_config")
    found = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return found if isinstance(found, int) else None


def _reference(
    given: Source | Reference, text: str | PathLike[str], chars: int, file: Any, options: dict[str, Any]
) -> Reference:
    """Return the reference. If it is a model, record it."""
    if isinstance(given, Reference):
        return given
    if isinstance(given, str | PathLike) and Path(given).is_file():
        return Reference(given)
    return record_reference(given, text, chars, file, **options)


class _Totals:
    """Sums over the predicted tokens."""

    def __init__(self, reference: Reference | None) -> None:
        self.reference = reference
        self.tokens = self.agreed = 0
        self.loss = self.reference_loss = self.kl = 0.0

    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch: logits [B, L, V] and targets [B, L]. Negative targets are ignored."""
        targets = targets.to(logits.device)
        for row, target in zip(logits, targets, strict=True):
            keep = target >= 0
            log_p, target = F.log_softmax(row[keep].float(), dim=-1), target[keep]
            if self.reference is not None:
                expected = self.reference.logits(self.tokens, self.tokens + len(target)).to(logits.device)
                self._compare(log_p, expected, target)
            self.tokens += len(target)
            self.loss += _finite_loss(log_p, target)

    def _compare(self, log_p: torch.Tensor, expected: torch.Tensor, target: torch.Tensor) -> None:
        if expected.shape != log_p.shape:
            message = f"predictions of the reference have shape {tuple(expected.shape)}"
            raise ReferenceMismatchError(f"{message}, but those of the model have {tuple(log_p.shape)}")
        log_q = F.log_softmax(expected, dim=-1)
        self.reference_loss += _finite_loss(log_q, target)
        terms = F.kl_div(log_p, log_q, reduction="none", log_target=True)
        self.kl += terms.masked_fill_(log_q.isneginf(), 0.0).sum().item()  # tokens that both models mask
        if not math.isfinite(self.kl):
            raise NonFiniteError(
                "the divergence is not finite: the model gives probability zero to tokens that the reference considers "
                "possible"
            )
        self.agreed += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())

    def report(self, seconds: float) -> EvaluationReport:
        """Return the means."""
        loss = self.loss / self.tokens
        report = EvaluationReport(self.tokens, loss, _perplexity(loss), seconds)
        if self.reference is None:
            return report
        reference, agreement = self.reference_loss / self.tokens, self.agreed / self.tokens
        report = replace(report, reference_loss=reference, reference_perplexity=_perplexity(reference))
        return replace(report, kl=self.kl / self.tokens, top1_agreement=agreement)


def _perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if it overflows."""
    return math.exp(loss) if loss < math.log(sys.float_info.max) else math.inf


def _finite_loss(log_p: torch.Tensor, target: torch.Tensor) -> float:
    """Return the summed loss of targets [T] from log-probabilities [T, V]."""
    losses = F.nll_loss(log_p, target, reduction="none")
    if not bool(losses.isfinite().all()):
        token = int(target[~losses.isfinite()][0])
        raise NonFiniteError(
            f"the loss is not finite: the model gives probability zero to token {token}, which is in the text"
        )
    return losses.sum().item()

"""How good a model is: its loss on a text, and how far it has moved from a reference.

The yardstick is fixed, so that figures compare across models and versions. Decoders: windows of 512 tokens that do not
overlap; every token but the first of a window is predicted. Encoder-decoders (Switch): the span corruption that T5 was
trained with (15 % noise, mean span of 3 tokens, numpy's default generator seeded with 0), over the target tokens. Loss
is in nats a token. Nothing here depends on how, or whether, the weights are packed.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from moepack.integrations.loading import open_model, open_tokenizer

__all__ = ["EvaluationReport", "evaluate", "span_corrupt"]

WINDOW = 512
BATCH = 8
NOISE_DENSITY = 0.15
MEAN_SPAN = 3
LOGITS_BUDGET = 1 << 30
"""Bytes of float32 logits of a batch; models with large vocabularies get smaller batches, which changes no figure."""

Model = Any
Source = str | PathLike[str] | Model
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class EvaluationReport:
    """What `evaluate` measured.

    Attributes:
        tokens: predicted tokens.
        loss: mean negative log-likelihood, nats a token.
        perplexity: exp(loss).
        seconds: time in the models, tokenization excluded.
        reference_loss, reference_perplexity: the same of the reference, None without one.
        kl: mean KL divergence of the model from the reference, KL(reference || model), nats a token; None without one.
        top1_agreement: share of tokens where both rank the same token first; None without a reference.
    """

    tokens: int
    loss: float
    perplexity: float
    seconds: float
    reference_loss: float | None = None
    reference_perplexity: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The figures that were measured, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@torch.inference_mode()
def evaluate(
    model: Source,
    text: str | PathLike[str],
    chars: int = 250_000,
    reference: Source | None = None,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str = torch.float32,
    mode: str | None = None,
    progress: Progress | None = None,
) -> EvaluationReport:
    """Measure a model's loss on a text.

    Args:
        model: a directory or an id of the hub, packed or not, or a loaded model (which needs `tokenizer`), on any
            device.
        text: the text file, UTF-8.
        chars: how many of its characters to use.
        reference: a directory, an id of the hub or a loaded model with the same vocabulary, to compare with.
        tokenizer: None loads that of the `model` directory.
        dtype: for models that are loaded here.
        mode: how a packed `model` that is loaded here multiplies group-wise integers; see `moepack.load`.
        progress: called after each batch with (windows done, windows in all, sum of losses so far over tokens).

    Raises:
        LoadError: a model or tokenizer cannot be loaded.
        ValueError: the text is shorter than one window, or reference and model differ in vocabulary or kind.
    """
    loaded, tokenizer = _open(model, tokenizer, dtype, mode)
    other = None if reference is None else _open(reference, tokenizer, dtype)[0]
    if other is not None and other.config.is_encoder_decoder != loaded.config.is_encoder_decoder:
        raise ValueError("the reference and the model are not both decoders, or both encoder-decoders")
    windows = _windows(Path(text), chars, tokenizer)
    totals = _Totals()
    start = time.perf_counter()
    for done, inputs, targets in _batches(loaded, windows, tokenizer):
        totals.add(loaded, other, inputs, targets)
        if progress is not None:
            progress(done, len(windows), totals.loss / totals.tokens)
    return totals.report(time.perf_counter() - start, other is not None)


class _Totals:
    """Sums over the predicted tokens."""

    def __init__(self) -> None:
        self.tokens = self.agreed = 0
        self.loss = self.reference_loss = self.kl = 0.0

    def add(self, model: Model, reference: Model | None, inputs: dict[str, Any], targets: torch.Tensor) -> None:
        """Run a batch: targets [B, L], of which the ignored are negative; logits are [B, L, V]."""
        logits = _run(model, inputs)
        targets = targets.to(logits.device)
        expected = None if reference is None else _run(reference, inputs).to(logits.device)
        if expected is not None and expected.shape != logits.shape:
            raise ValueError(f"the reference predicts {tuple(expected.shape)}, the model {tuple(logits.shape)}")
        for row, target in enumerate(targets):
            keep = target >= 0
            log_p = F.log_softmax(logits[row][keep].float(), dim=-1)
            self.tokens += int(keep.sum())
            self.loss += F.nll_loss(log_p, target[keep], reduction="sum").item()
            if expected is not None:
                self._compare(log_p, F.log_softmax(expected[row][keep].float(), dim=-1), target[keep])

    def _compare(self, log_p: torch.Tensor, log_q: torch.Tensor, target: torch.Tensor) -> None:
        self.reference_loss += F.nll_loss(log_q, target, reduction="sum").item()
        self.kl += F.kl_div(log_p, log_q, reduction="sum", log_target=True).item()
        self.agreed += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())

    def report(self, seconds: float, compared: bool) -> EvaluationReport:
        """Turn the sums into means."""
        loss = self.loss / self.tokens
        report = EvaluationReport(self.tokens, loss, math.exp(loss), seconds)
        if not compared:
            return report
        reference = self.reference_loss / self.tokens
        agreement = self.agreed / self.tokens
        return EvaluationReport(
            *(self.tokens, loss, math.exp(loss), seconds),
            *(reference, math.exp(reference), self.kl / self.tokens, agreement),
        )


def _run(model: Model, inputs: dict[str, Any]) -> torch.Tensor:
    """Logits of a batch, on the model's device."""
    moved = {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
    }
    return model(**moved).logits  # type: ignore[no-any-return]


def _open(source: Source, tokenizer: Any, dtype: torch.dtype | str, mode: str | None = None) -> tuple[Model, Any]:
    if not isinstance(source, str | PathLike):
        if tokenizer is None:
            raise ValueError("a loaded model needs its tokenizer: evaluate(model, text, tokenizer=...)")
        return source, tokenizer
    return open_model(source, dtype, mode=mode), open_tokenizer(source) if tokenizer is None else tokenizer


def _windows(file: Path, chars: int, tokenizer: Any) -> NDArray[np.int64]:
    """Token ids in rows of one window, the rest left out."""
    try:
        with open(file, encoding="utf-8") as stream:
            text = stream.read(chars)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: is not UTF-8 text ({error.reason})") from error
    ids = np.array(tokenizer(text, add_special_tokens=False, verbose=False).input_ids, np.int64)
    if len(ids) < WINDOW:
        raise ValueError(f"{file}: {len(ids)} tokens are less than one window of {WINDOW}")
    return ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)


def _batches(
    model: Model, windows: NDArray[np.int64], tokenizer: Any
) -> Iterator[tuple[int, dict[str, Any], torch.Tensor]]:
    """Yield (windows done after it, the model's inputs, the token that each position of the logits predicts or -1)."""
    if model.config.is_encoder_decoder:
        yield from _corrupted(windows, tokenizer)
        return
    vocabulary = model.config.get_text_config().vocab_size
    size = max(1, min(BATCH, LOGITS_BUDGET // (4 * WINDOW * vocabulary)))
    for start in range(0, len(windows), size):
        batch = torch.from_numpy(windows[start : start + size])
        yield start + len(batch), {"input_ids": batch, "use_cache": False}, F.pad(batch[:, 1:], (0, 1), value=-1)


def _corrupted(windows: NDArray[np.int64], tokenizer: Any) -> Iterator[tuple[int, dict[str, Any], torch.Tensor]]:
    spans = int(WINDOW * NOISE_DENSITY) // MEAN_SPAN
    sentinels = [tokenizer.convert_tokens_to_ids(f"<extra_id_{number}>") for number in range(spans)]
    if missing := [number for number, token in enumerate(sentinels) if token in (None, tokenizer.unk_token_id)]:
        raise ValueError(f"the tokenizer has no <extra_id_{missing[0]}>: span corruption needs {spans} sentinels")
    generator = np.random.default_rng(0)
    for done, window in enumerate(windows, 1):
        source, target = span_corrupt(window, sentinels, tokenizer.eos_token_id, generator)
        labels = torch.tensor([target])
        yield done, {"input_ids": torch.tensor([source]), "labels": labels}, labels


def span_corrupt(
    ids: NDArray[np.int64], sentinels: list[int], end: int, generator: np.random.Generator
) -> tuple[list[int], list[int]]:
    """Cut noise spans out of a window, as T5's pre-training does (Raffel et al. 2020, section 3.1.4).

    Args:
        ids: [L], L >= 40.
        sentinels: ids that stand for the spans, in order.
        end: id that ends both sequences.
        generator: draws the lengths of noise spans first, then those of the text between them.

    Returns:
        The source (text with a sentinel for each span) and the target (each sentinel with its span).
    """
    noise = int(len(ids) * NOISE_DENSITY)
    spans = max(1, noise // MEAN_SPAN)
    lengths = [_partition(total, spans, generator) for total in (noise, len(ids) - noise)]
    source: list[int] = []
    target: list[int] = []
    position = 0
    for sentinel, cut, kept in zip(sentinels[:spans], *lengths, strict=True):
        source += [*ids[position : position + kept].tolist(), sentinel]
        target += [sentinel, *ids[position + kept : position + kept + cut].tolist()]
        position += kept + cut
    return [*source, end], [*target, end]


def _partition(total: int, parts: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Split `total` into `parts` positive lengths, uniformly."""
    cuts = np.sort(generator.choice(np.arange(1, total), parts - 1, replace=False))
    return np.diff(np.concatenate([[0], cuts, [total]]))

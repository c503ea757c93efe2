"""The evaluation text: windows of tokens, and which of them are predicted.

Decoders: windows of 512 tokens that do not overlap; every token but the first of a window is predicted.
Encoder-decoders (Switch): the span corruption that T5 was trained with (15 % noise, mean span of 3 tokens, numpy's
default generator seeded with 0), over the target tokens.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from moepack.textfile import read_text

__all__ = ["Windows", "batch_size", "batches", "read_windows", "span_corrupt"]

WINDOW = 512
BATCH = 8
NOISE_DENSITY = 0.15
MEAN_SPAN = 3
LOGITS_BUDGET = 1 << 30
"""Maximum bytes of a batch's float32 logits. Large vocabularies get smaller batches, without any effect on results."""

Batch = tuple[int, dict[str, Any], torch.Tensor]
"""(Windows done after the batch, the model's inputs, targets [B, L] with -1 for positions to ignore)."""


@dataclass(frozen=True)
class Windows:
    """A tokenized text.

    Attributes:
        ids: token ids [N, 512] of whole windows. The rest of the text is dropped.
        text: SHA-256 of the characters, in hex.
        tokens: SHA-256 of `ids`, in hex. It differs between tokenizers.
    """

    ids: NDArray[np.int64]
    text: str
    tokens: str

    def __len__(self) -> int:
        return len(self.ids)


def read_windows(file: Path, chars: int, tokenizer: Any) -> Windows:
    """Read the first `chars` characters of a text file.

    Raises:
        TextError: the file cannot be read or is not text.
        ValueError: the text is shorter than one window.
    """
    text = read_text(file, chars)
    ids = np.array(tokenizer(text, add_special_tokens=False, verbose=False).input_ids, np.int64)
    if len(ids) < WINDOW:
        raise ValueError(f"{file}: {len(ids)} tokens are less than one window of {WINDOW}")
    whole = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)
    digests = (hashlib.sha256(data).hexdigest() for data in (text.encode(), whole.tobytes()))
    return Windows(whole, *digests)


def batch_size(config: Any) -> int:
    """Return the number of windows per batch for a decoder."""
    vocabulary = int(config.get_text_config().vocab_size)
    return max(1, min(BATCH, LOGITS_BUDGET // (4 * WINDOW * vocabulary)))


def batches(config: Any, windows: Windows, tokenizer: Any) -> Iterator[Batch]:
    """Yield batches of windows for a model of this configuration."""
    if config.is_encoder_decoder:
        yield from _corrupted(windows.ids, tokenizer)
        return
    size = batch_size(config)
    for start in range(0, len(windows), size):
        batch = torch.from_numpy(windows.ids[start : start + size])
        yield start + len(batch), {"input_ids": batch, "use_cache": False}, F.pad(batch[:, 1:], (0, 1), value=-1)


def _corrupted(windows: NDArray[np.int64], tokenizer: Any) -> Iterator[Batch]:
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
    """Cut noise spans out of a window, as in T5's pre-training (Raffel et al. 2020, section 3.1.4).

    Args:
        ids: token ids [L], L >= 40.
        sentinels: ids of the sentinels, in order.
        end: id that ends both sequences.
        generator: draws the lengths of the noise spans first, then those of the text between them.

    Returns:
        The source (text with a sentinel in place of each span) and the target (each sentinel followed by its span).
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
    """Split `total` into `parts` positive lengths, uniformly at random."""
    cuts = np.sort(generator.choice(np.arange(1, total), parts - 1, replace=False))
    return np.diff(np.concatenate([[0], cuts, [total]]))

"""Calibration samples: the model's inputs, and the positions that count.

A decoder-only model receives the windows unchanged. An encoder-decoder model receives T5's span corruption of them: 15%
of the tokens, in spans of 3 on average, are replaced by sentinels in the encoder's input and written out in the
decoder's. Positions of special tokens are excluded from the Hessians (premasking; QMoE, section 3.3): the sentinels in
the encoder, and the positions that *predict* a sentinel in the decoder. All samples of one stream have the same length.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.errors import CalibrationError

__all__ = ["Samples", "SpanTokens", "decoder_samples", "seq2seq_samples"]

NOISE_DENSITY, MEAN_SPAN = 0.15, 3


@dataclass(frozen=True)
class Samples:
    """Calibration samples of one model.

    Attributes:
        inputs: [N, L] int64, inputs of the decoder-only model or of the encoder.
        input_mask: [N, L] bool, the positions that count for Hessians.
        targets: [N, T] int64 inputs of the decoder (shifted right), or ``None`` for a decoder-only model.
        target_mask: [N, T] bool, or ``None``.
    """

    inputs: Tensor
    input_mask: Tensor
    targets: Tensor | None = None
    target_mask: Tensor | None = None

    def fingerprint(self) -> str:
        """Return the SHA-256 of all ids and masks (hexadecimal), which identifies the calibration set in a journal."""
        digest = hashlib.sha256()
        for tensor in (self.inputs, self.input_mask, self.targets, self.target_mask):
            if tensor is not None:
                digest.update(f"{tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class SpanTokens:
    """Special ids of an encoder-decoder model: sentinels in order of use, end of text, and the decoder's start."""

    sentinels: tuple[int, ...]
    end: int
    start: int


def decoder_samples(windows: Tensor) -> Samples:
    """Return samples of a decoder-only model; every position counts."""
    return Samples(windows, torch.ones_like(windows, dtype=torch.bool))


def seq2seq_samples(windows: Tensor, special: SpanTokens, *, seed: int = 0, premask: bool = True) -> Samples:
    """Apply span corruption to windows [N, L].

    Args:
        windows: token ids.
        special: ids of the sentinels, the end and the start token.
        seed: seed of the spans.
        premask: exclude the positions of special tokens from the Hessians.

    Raises:
        CalibrationError: a window is too short for one span, or needs more sentinels than the model has.
    """
    length = windows.shape[1]
    noise = int(length * NOISE_DENSITY)
    spans = max(1, noise // MEAN_SPAN)
    if noise < 1:
        raise CalibrationError(f"samples of {length} tokens are too short for span corruption, which requires 7")
    if spans > len(special.sentinels):
        raise CalibrationError(
            f"samples of {length} tokens need {spans} sentinels, but the model has {len(special.sentinels)}: "
            "use a shorter sequence length"
        )
    generator = np.random.default_rng(seed)
    pairs = [_corrupt(window, spans, noise, special, generator) for window in windows.numpy()]
    sources = torch.from_numpy(np.stack([source for source, _ in pairs]))
    labels = torch.from_numpy(np.stack([target for _, target in pairs]))
    targets = torch.cat([torch.full_like(labels[:, :1], special.start), labels[:, :-1]], dim=1)
    marks = torch.tensor(special.sentinels)
    keep = [~torch.isin(ids, marks) if premask else torch.ones_like(ids, dtype=torch.bool) for ids in (sources, labels)]
    return Samples(sources, keep[0], targets, keep[1])


def _corrupt(
    window: npt.NDArray[np.int64], spans: int, noise: int, special: SpanTokens, generator: np.random.Generator
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (encoder ids, labels) of one window: kept and noise segments alternate, starting with a kept one."""
    kept = _segments(len(window) - noise, spans, generator)
    lost = _segments(noise, spans, generator)
    lengths = np.stack([kept, lost], axis=1).ravel()
    pieces = np.split(window, np.cumsum(lengths)[:-1])
    source: list[npt.NDArray[np.int64]] = []
    labels: list[npt.NDArray[np.int64]] = []
    for sentinel, keep, drop in zip(special.sentinels, pieces[::2], pieces[1::2], strict=False):
        mark = np.array([sentinel], dtype=np.int64)
        source += [keep, mark]
        labels += [mark, drop]
    end = np.array([special.end], dtype=np.int64)
    return np.concatenate([*source, end]), np.concatenate([*labels, end])


def _segments(total: int, count: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return ``count`` positive lengths with the sum ``total``, uniform over all such lists."""
    cuts = np.sort(generator.choice(np.arange(1, total), count - 1, replace=False))
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(np.int64)

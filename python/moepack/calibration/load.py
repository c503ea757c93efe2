"""Creates calibration samples from a checkpoint and a text source, using the tokenizer and special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

from transformers import AutoConfig, AutoTokenizer

from moepack.calibration.own import own_windows
from moepack.calibration.samples import Samples, SpanTokens, decoder_samples, seq2seq_samples
from moepack.calibration.settings import CalibrationSettings
from moepack.calibration.text import token_windows
from moepack.checkpoint import Checkpoint
from moepack.checkpoint.classes import building
from moepack.errors import CalibrationError
from moepack.textfile import BUILT_IN, OWN_SAMPLES

__all__ = ["CalibrationRequest", "load_samples", "span_tokens"]

#: T5's tokenizers have this many sentinels; smaller vocabularies may have fewer.
SENTINELS = 100


@dataclass(frozen=True)
class CalibrationRequest:
    """The calibration that a method needs.

    Attributes:
        source, samples, length, premask, seed: the calibration set, as for `load_samples`.
        settings: how the model runs.
    """

    source: str
    samples: int
    length: int
    settings: CalibrationSettings
    premask: bool = True
    seed: int = 0

    def load(self, checkpoint: Checkpoint) -> Samples:
        """Return the calibration set; raises as `load_samples`. Do not change its tensors.

        A job asks several times. The built-in text, which no file can change, is tokenized once for each checkpoint.
        """
        known = _BUILT_IN.setdefault(checkpoint, {}) if self.source == BUILT_IN else {}
        key = (self.samples, self.length, self.premask, self.seed)
        if key not in known:
            known[key] = load_samples(
                checkpoint, self.source, self.samples, self.length, premask=self.premask, seed=self.seed
            )
        return known[key]


_BUILT_IN: WeakKeyDictionary[Checkpoint, dict[tuple[int, int, bool, int], Samples]] = WeakKeyDictionary()
"""Sets of the built-in text."""


def load_samples(
    checkpoint: Checkpoint,
    source: str | PathLike[str],
    samples: int,
    length: int,
    *,
    premask: bool = True,
    seed: int = 0,
) -> Samples:
    """Return calibration samples for a checkpoint's model.

    Args:
        checkpoint: a checkpoint with a tokenizer.
        source: see `read_texts`, or `OWN_SAMPLES`.
        samples: maximum number of windows.
        length: tokens per window, before span corruption.
        premask: exclude the positions of special tokens from the Hessians (encoder-decoder models).
        seed: seed of the span corruption.

    Raises:
        UnsupportedModelError: transformers cannot build the configuration.
        CalibrationError: the text or the tokenizer is unusable, or a window exceeds the model's positions.
    """
    with building(checkpoint.path):
        config = AutoConfig.from_pretrained(checkpoint.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.path)
    except Exception as error:  # tokenizers raise plain Exception for files that they cannot parse
        reason = " ".join(str(error).split())
        raise CalibrationError(f"the tokenizer cannot be loaded: {reason}", file=checkpoint.path) from error
    text = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and length > positions:
        message = f"samples of {length} tokens are longer than the model's {positions} positions"
        raise CalibrationError(f"{message}: use a shorter sequence length")
    vocabulary = int(text.vocab_size)
    if source == OWN_SAMPLES:
        windows = own_windows(checkpoint, tokenizer, samples, length, vocabulary)
    else:
        windows = token_windows(tokenizer, source, samples, length, vocabulary)
    if not config.is_encoder_decoder:
        return decoder_samples(windows)
    return seq2seq_samples(windows, span_tokens(tokenizer, config), seed=seed, premask=premask)


def span_tokens(tokenizer: Any, config: Any) -> SpanTokens:
    """Return the special ids of an encoder-decoder model with T5's sentinels `<extra_id_0>`, `<extra_id_1>`, ...

    Raises:
        CalibrationError: the tokenizer has no sentinels, or the model has no end or start token.
    """
    vocabulary = tokenizer.get_vocab()
    sentinels: list[int] = []
    while len(sentinels) < SENTINELS and (token := f"<extra_id_{len(sentinels)}>") in vocabulary:
        sentinels.append(int(vocabulary[token]))
    start = getattr(config, "decoder_start_token_id", None)
    if not sentinels or config.eos_token_id is None or start is None:
        raise CalibrationError("span corruption requires <extra_id_0> in the tokenizer, an end token and a start token")
    return SpanTokens(tuple(sentinels), int(config.eos_token_id), int(start))

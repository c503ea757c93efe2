"""Compares the packed model with the original: figures and sample texts. One model is in memory at a time."""

import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from typing import Any

from moepack.evaluation import EvaluationReport, Reference, evaluate, record_reference
from moepack.evaluation.models import Progress, dtype_of
from moepack.evaluation.reference import fits
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.serving.text.generation import generate
from moepack.serving.text.sampling import Sampling
from moepack.textfile import read_text

__all__ = ["SAMPLES", "Continuation", "Quality", "measure", "prompts_of"]

SAMPLES = 3
TOKENS = 60
TEMPERATURE = 0.7
PROMPT = 160
"""Maximum characters of a prompt taken from the text."""


@dataclass(frozen=True)
class Continuation:
    """A prompt and its continuations. `original` is None if the original was not loaded completely."""

    prompt: str
    packed: str
    original: str | None


@dataclass(frozen=True)
class Quality:
    """The measured quality.

    Attributes:
        text: name of the text file, without its directory.
        chars: maximum number of characters used.
        figures: loss and divergence.
        continuations: continuations by both models, with the same random numbers.
    """

    text: str
    chars: int
    figures: EvaluationReport
    continuations: tuple[Continuation, ...]


def measure(
    directory: Path,
    text: Path,
    chars: int,
    reference: str | PathLike[str] | None = None,
    prompts: Sequence[str] = (),
    progress: Progress | None = None,
) -> Quality:
    """Evaluate a packed model, and generate sample texts with it and its original.

    Args:
        directory: the packed directory.
        text: the text file, UTF-8.
        chars: number of characters to use.
        reference: the original: a directory, a Hub id, or a recorded reference (which generates no text).
        prompts: prompts to continue; default: excerpts of the text. Encoder-decoders generate no samples.
        progress: as for `evaluate`.
    """
    tokenizer = open_tokenizer(directory)
    chosen = tuple(prompts) or prompts_of(text, chars)
    known, originals = _original(reference, text, chars, tokenizer, chosen, progress)
    model = open_model(directory, "float32")
    figures = evaluate(model, text, chars, known, tokenizer=tokenizer, progress=progress)
    written = _continued(model, tokenizer, chosen)
    pairs: Any = zip_longest(chosen[: len(written)], written, originals or ())
    return Quality(text.name, chars, figures, tuple(Continuation(*each) for each in pairs))


def _original(
    source: Any, text: Path, chars: int, tokenizer: Any, prompts: Sequence[str], progress: Progress | None
) -> tuple[Reference | None, list[str] | None]:
    """Return the original's predictions, and its texts if it was loaded completely. It is freed afterwards."""
    if source is None or Path(source).is_file():
        return (None if source is None else Reference(source)), None
    options = {"tokenizer": tokenizer, "progress": progress}
    if not fits(source, dtype_of("float32")):
        return record_reference(source, text, chars, **options), None
    model = open_model(source, "float32")
    written, known = _continued(model, tokenizer, prompts), record_reference(model, text, chars, **options)
    del model
    gc.collect()
    return known, written


def _continued(model: Any, tokenizer: Any, prompts: Sequence[str]) -> list[str]:
    if model.config.is_encoder_decoder:
        return []
    sampling = Sampling(max_new_tokens=TOKENS, temperature=TEMPERATURE)
    return [generate(model, tokenizer, prompt, sampling).text for prompt in prompts]


def prompts_of(text: Path, chars: int) -> tuple[str, ...]:
    """Return evenly spaced excerpts of a text that start with a sentence and end after a word."""
    words = " ".join(read_text(text, chars).split())
    prompts = []
    for number in range(1, SAMPLES + 1):
        place = len(words) * number // (SAMPLES + 1)
        start = re.search(r"[.!?][\"'”’]? (?=[A-Z])", words[place:])
        rest = words[place + start.end() :] if start else words[place:]
        prompts.append(rest[:PROMPT].rpartition(" ")[0] or rest[:PROMPT])
    return tuple(prompt for prompt in prompts if prompt)

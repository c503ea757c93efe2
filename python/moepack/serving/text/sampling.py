"""Sampling settings, and the choice of the next token; shared by everything that generates.

The arithmetic and its order are those of transformers' logits processors: repetition penalty, temperature, top-k,
top-p, min-p.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from moepack.decoding.finite import are_finite
from moepack.decoding.vocabulary import require_head
from moepack.errors import NonFiniteError

__all__ = ["Sampler", "Sampling", "given"]

COLDEST = 1e-6
"""The lowest divisor of logits: float32 logits overflow with less. Sampling is already greedy at this temperature."""


@dataclass(frozen=True)
class Sampling:
    """Settings for generation; the defaults are greedy.

    Attributes:
        temperature: 0 is greedy, larger values sample; below 1 favors likely tokens.
        top_p: sample from the likeliest tokens whose probabilities sum to this, in (0, 1].
        top_k: sample from this many of the likeliest tokens; 0 means all.
        min_p: exclude tokens below this fraction of the largest probability, in [0, 1].
        repetition_penalty: values above 1 make tokens that already occurred less likely (Keskar et al. 2019, section
            4.1).
        max_new_tokens: the most tokens to generate.
        stop: strings that end the text; they are not part of it.
        seed: random seed; None draws one.

    Raises:
        ValueError: a setting is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    seed: int | None = 0

    def __post_init__(self) -> None:
        for name, is_sound, wanted in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "a finite number of at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a finite number above 0"),
            ("stop", all(self.stop), "not an empty string"),
        ):
            if not is_sound:
                raise ValueError(f"{name} must be {wanted}")

    @classmethod
    def of_model(cls, model: Any, **chosen: Any) -> "Sampling":
        """Combine explicit settings with a model's published ones.

        Args:
            model: a loaded model; its generation_config applies if it enables sampling.
            chosen: fields by name; None means unset.

        Raises:
            UnsupportedModelError: the model has no language-model head.
        """
        require_head(model)
        published = model.generation_config
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty") if published.do_sample else ()
        settings = {name: getattr(published, name, None) for name in names}
        return cls(**{"seed": None, **given(**settings), **given(**chosen)})

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of transformers' `generate` for these settings, except stop strings and the seed."""
        always = {"max_new_tokens": self.max_new_tokens, "repetition_penalty": self.repetition_penalty}
        if not self.temperature:
            return {**always, "do_sample": False}
        drawn = {
            "temperature": max(self.temperature, COLDEST),
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or None,
        }
        return {**always, "do_sample": True, **drawn}


def given(**settings: Any) -> dict[str, Any]:
    """Return the settings that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


class Sampler:
    """Chooses the tokens of one sequence, with its own random generator."""

    def __init__(self, sampling: Sampling) -> None:
        from transformers import generation

        self._draws = sampling.temperature > 0
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)
        self._processors = generation.LogitsProcessorList()
        if sampling.repetition_penalty != 1:
            self._processors.append(generation.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if self._draws:
            self._processors.append(generation.TemperatureLogitsWarper(max(sampling.temperature, COLDEST)))
            if sampling.top_k:
                self._processors.append(generation.TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._processors.append(generation.TopPLogitsWarper(sampling.top_p))
            if sampling.min_p:
                self._processors.append(generation.MinPLogitsWarper(sampling.min_p))

    def choose(self, logits: torch.Tensor, ids: list[int]) -> int:
        """Return the next token.

        Args:
            logits: `[vocabulary]`.
            ids: the tokens so far, prompt included.

        Raises:
            NonFiniteError: the model computes NaN or infinity.
        """
        if not are_finite(logits):
            raise NonFiniteError("the model's logits are not finite")
        scores = self.scores(logits, ids)
        if not self._draws:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1).cpu(), 1, generator=self._random))

    def scores(self, logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """Return log-probabilities up to a constant, `[vocabulary]`; arguments as in `choose`."""
        scores = logits.float().unsqueeze(0)
        if self._processors:
            scores = self._processors(torch.tensor([ids], device=scores.device), scores)
        return scores[0]

"""Sampling settings, and the choice of the next token; shared by everything that generates.

The arithmetic and its order are those of transformers' logits processors: repetition penalty, the processors that
transformers lacks (`Steered`), allowed tokens, temperature, top-k, top-p, min-p, typical-p.

A token of a small model takes a millisecond, so the work per token over the whole vocabulary is kept small: greedy
answers compute no mask while their tokens are allowed, top-p sorts only the likeliest tokens, and torch runs in one
thread, because waking others takes longer than the work.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moepack.backends.threads import one_thread
from moepack.decoding.drawing import COLDEST, Draw
from moepack.decoding.finite import are_finite
from moepack.decoding.vocabulary import require_head
from moepack.errors import NonFiniteError

__all__ = ["Allowed", "Sampler", "Sampling", "Steered", "TopP", "given"]

PUBLISHED = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
"""Settings of generation_config.json that apply if it enables sampling."""
_NOT_FINITE = "the model's logits are not finite"
LIKELIEST = 512
"""Number of tokens that top-p sorts first. The whole vocabulary is sorted if their probabilities do not suffice."""


@dataclass(frozen=True)
class Sampling:
    """Settings for generation; the defaults are greedy.

    Attributes:
        temperature: 0 is greedy, larger values sample; below 1 favors likely tokens.
        top_p: sample from the likeliest tokens whose probabilities sum to this, in (0, 1].
        top_k: sample from this many of the likeliest tokens; 0 means all.
        min_p: exclude tokens below this fraction of the largest probability, in [0, 1].
        typical_p: sample from the tokens closest to the expected information whose probabilities sum to this (Meister
            et al. 2022), in (0, 1].
        repetition_penalty: values above 1 make tokens that already occurred less likely (Keskar et al. 2019, section
            4.1).
        presence_penalty: subtracted from the logits of tokens that occur in the answer.
        frequency_penalty: subtracted from the logits of tokens for each time that they occur in the answer.
        logit_bias: pairs of a token id and a value that is added to its logit.
        max_new_tokens: the most tokens to generate.
        min_tokens: tokens that end an answer are excluded before this many tokens.
        ignore_eos: the model's end tokens do not end the answer.
        stop_token_ids: further tokens that end the answer; they are not part of the text.
        stop: strings that end the text; they are not part of it.
        seed: random seed; None draws one.

    Raises:
        ValueError: a setting is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_new_tokens: int = 64
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = 0

    def __post_init__(self) -> None:
        for name, is_sound, wanted in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "a finite number of at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("typical_p", 0 < self.typical_p <= 1, "above 0 and at most 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a finite number above 0"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "a finite number"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number"),
            ("logit_bias", all(token >= 0 and math.isfinite(bias) for token, bias in self.logit_bias),
             "pairs of a token id and a finite number"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_new_tokens, "between 0 and max_new_tokens"),
            ("seed", self.seed is None or -(1 << 63) <= self.seed < 1 << 64, "an integer of 64 bits"),
            ("stop_token_ids", all(token >= 0 for token in self.stop_token_ids), "token ids"),
            ("stop", all(self.stop), "text that is not empty"),
        ):  # fmt: skip
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
        names = PUBLISHED if published.do_sample else ()
        settings = {name: getattr(published, name, None) for name in names}
        return cls(**{"seed": None, **given(**settings), **given(**chosen)})

    def ends(self, published: Iterable[int]) -> frozenset[int]:
        """Return the tokens that end the answer, given the model's end tokens."""
        return frozenset({*(() if self.ignore_eos else published), *self.stop_token_ids})

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of transformers' `generate` for these settings.

        Stop strings, end tokens, the seed and the processors of `Steered` are separate.
        """
        always = {"max_new_tokens": self.max_new_tokens, "repetition_penalty": self.repetition_penalty}
        if not self.temperature:
            return {**always, "do_sample": False}
        drawn = {
            "temperature": max(self.temperature, COLDEST),
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or None,
            "typical_p": self.typical_p,
        }
        return {**always, "do_sample": True, **drawn}


def given(**settings: Any) -> dict[str, Any]:
    """Return the settings that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


class Steered:
    """A logits processor for bias, penalties on the answer's tokens, and its minimum length.

    Args:
        sampling: the settings.
        prompt: number of tokens before the answer.
        ends: tokens that end the answer.
    """

    def __init__(self, sampling: Sampling, prompt: int, ends: Iterable[int] = ()) -> None:
        self._sampling, self._prompt = sampling, prompt
        self._ends = torch.tensor(sorted(ends), dtype=torch.long)
        pairs = sampling.logit_bias
        self._biased = torch.tensor([token for token, _ in pairs], dtype=torch.long)
        self._bias = torch.tensor([bias for _, bias in pairs], dtype=torch.float32)

    @property
    def is_needed(self) -> bool:
        """Whether the processor can change any logit."""
        sampling = self._sampling
        penalties = sampling.presence_penalty or sampling.frequency_penalty
        return bool(penalties or sampling.logit_bias or sampling.min_tokens)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token, shape (1, vocabulary), given the tokens so far, shape (1, tokens)."""
        scores = scores.clone()
        answer = input_ids[0, self._prompt :]
        sampling = self._sampling
        if len(self._biased):
            scores[0].index_add_(0, self._biased.to(scores.device), self._bias.to(scores))
        if (sampling.presence_penalty or sampling.frequency_penalty) and len(answer):
            found, counts = torch.unique(answer, return_counts=True)
            scores[0, found] -= sampling.presence_penalty + sampling.frequency_penalty * counts.to(scores.dtype)
        if len(answer) < sampling.min_tokens:
            scores[0, self._ends.to(scores.device)] = -math.inf
        return scores


class Allowed(Protocol):
    """The tokens that may follow, which change with each token of an answer."""

    def allows(self, token: int) -> bool:
        """Return whether a token can follow."""

    def allowed(self) -> torch.Tensor | None:
        """Return the mask of tokens that can follow, shape (vocabulary,); None allows all."""


class TopP:
    """transformers' top-p, without sorting the whole vocabulary if the likeliest tokens suffice.

    A sort of 49,152 logits takes 3.3 ms, of the likeliest 512 of them 0.06 ms (Zen 5, one thread).
    """

    def __init__(self, top_p: float) -> None:
        from transformers import generation

        self._top_p, self._whole = top_p, generation.TopPLogitsWarper(top_p)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, shape (1, vocabulary), with -inf for excluded tokens."""
        values, ids = scores.topk(min(LIKELIEST, scores.shape[-1]))
        sums = (values - scores.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
        if len(ids[0]) < scores.shape[-1] and sums[0, -1] < self._top_p:
            found: torch.Tensor = self._whole(input_ids, scores)
            return found
        count = 1 + int((sums[0, :-1] < self._top_p).sum())
        return torch.full_like(scores, -math.inf).scatter_(1, ids[:, :count], values[:, :count])


class Sampler:
    """Chooses the tokens of one sequence, with its own random generator.

    Args:
        sampling: the settings.
        prompt: number of tokens before the answer.
        ends: tokens that end the answer.
        allowed: restricts the tokens; None allows all.
    """

    def __init__(
        self, sampling: Sampling, prompt: int = 0, ends: Iterable[int] = (), allowed: Allowed | None = None
    ) -> None:
        from transformers import generation

        self._draws, self._sampling, self._prompt = sampling.temperature > 0, sampling, prompt
        self._numbers: list[float] = []  # of the answer's tokens
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)
        self._allowed = allowed
        # Called in turn: transformers' list of processors inspects the signature of each one at every token.
        self._steering: list[Any] = []
        if sampling.repetition_penalty != 1:
            self._steering.append(generation.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        steered = Steered(sampling, prompt, ends)
        if steered.is_needed:
            self._steering.append(steered)
        self._warpers: list[Any] = []
        if self._draws:
            self._warpers.append(generation.TemperatureLogitsWarper(max(sampling.temperature, COLDEST)))
            if sampling.top_k:
                self._warpers.append(generation.TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._warpers.append(TopP(sampling.top_p))
            if sampling.min_p:
                self._warpers.append(generation.MinPLogitsWarper(sampling.min_p))
            if sampling.typical_p < 1:
                self._warpers.append(generation.TypicalLogitsWarper(sampling.typical_p))

    @property
    def is_greedy(self) -> bool:
        """Whether it always chooses the token with the largest logit."""
        return not self._draws and not self._steering and self._allowed is None

    @property
    def draws_anywhere(self) -> bool:
        """Whether a `Draw` describes the choice completely, so that a device can make it."""
        return self._draws and not self._steering and self._allowed is None and self._sampling.typical_p == 1

    def draw(self, length: int) -> Draw:
        """Return how the token after `length` others, prompt included, is drawn; the same whenever it is asked."""
        sampling = self._sampling
        return Draw(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, self._uniform(length))

    def _uniform(self, length: int) -> float:
        """The random number of a token."""
        while len(self._numbers) <= length - self._prompt:
            self._numbers.append(float(torch.rand(1, generator=self._random, dtype=torch.float64)))
        return self._numbers[length - self._prompt]

    def choose(self, logits: torch.Tensor, ids: list[int]) -> int:
        """Return the next token.

        Args:
            logits: `[vocabulary]`.
            ids: the tokens so far, prompt included.

        Raises:
            NonFiniteError: the model computes NaN or infinity. A greedy choice from unchanged logits does not notice
                negative infinity at other tokens.
        """
        with one_thread():
            if (self._draws or self._steering) and not are_finite(logits):
                raise NonFiniteError(_NOT_FINITE)
            if self._draws:
                return _drawn(self.scores(logits, ids), self._uniform(len(ids)))
            scores = self._steered(logits, ids)
            token, largest = _likeliest(scores)
            if not self._steering and not math.isfinite(largest):  # unchanged logits: the largest one shows it
                raise NonFiniteError(_NOT_FINITE)
            if self._allowed is None or self._allowed.allows(token):
                return token
            return _likeliest(self._masked(scores))[0]

    def scores(self, logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """Return log-probabilities up to a constant, `[vocabulary]`; arguments as in `choose`."""
        scores = self._masked(self._steered(logits, ids))
        for warp in self._warpers:
            scores = warp(None, scores)  # warpers do not read the tokens
        return scores[0]

    def _steered(self, logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """Return logits that depend on the tokens so far, shape (1, vocabulary)."""
        scores = logits.float().unsqueeze(0)
        if self._steering:
            read = torch.tensor([ids], device=scores.device)
            for process in self._steering:
                scores = process(read, scores)
        return scores

    def _masked(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores with -inf for tokens that cannot follow."""
        mask = None if self._allowed is None else self._allowed.allowed()
        if mask is None:
            return scores
        # `where` is faster than filling a mask: 5 instead of 290 us for 8,192 logits (torch 2.15, Zen 3).
        return torch.where(mask.to(scores.device), scores, scores.new_tensor(-math.inf))


def _likeliest(scores: torch.Tensor) -> tuple[int, float]:
    """Return the token with the largest score, shape (1, vocabulary), and that score; NaN counts as the largest.

    NumPy's `argmax` takes a tenth of the time of torch's: 2 us for 49,152 scores (Zen 5).
    """
    values = scores.cpu().numpy()[0]
    token = int(values.argmax())
    return token, float(values[token])


def _drawn(scores: torch.Tensor, uniform: float) -> int:
    """Draw a token from log-probabilities, shape (vocabulary,), by inverting the cumulative distribution at a place.

    torch's `multinomial` draws one random number per token: 0.83 instead of 0.05 ms for 49,152 of them (Zen 5).
    """
    sums = scores.softmax(-1).cpu().cumsum(-1, dtype=torch.float64)
    # Strictly below the last sum, so a token without probability is never chosen.
    place = uniform * sums[-1] * (1 - 2**-52)
    return int(torch.searchsorted(sums, place, right=True))

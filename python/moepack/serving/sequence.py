"""One running answer: its tokens, sampler, text, scores and receiver."""

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from moepack.serving.isolation import Chosen, Part
from moepack.serving.text.sampling import Allowed, Sampler, Sampling
from moepack.serving.text.stream import TextStream, hidden_tokens

__all__ = ["TEXT_ONLY", "Constraint", "Piece", "Score", "Sequence", "Wanted"]

Finish = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Score:
    """The log-probability of a token, given all tokens before it, from the model's own logits.

    Attributes:
        token: the token's id.
        logprob: its log-probability in nats; None for the first token of a prompt.
        top: the likeliest tokens with their log-probabilities, in descending order.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class Constraint(Allowed, Protocol):
    """Restricts the tokens of one answer. Called in the engine's thread."""

    @property
    def is_complete(self) -> bool:
        """Whether no token can follow."""

    def take(self, token: int) -> None:
        """Add a chosen token."""


@dataclass(frozen=True)
class Wanted:
    """What an answer is wanted for, besides its text.

    Attributes:
        top: return scores with this many of the likeliest tokens; None returns no scores.
        scores_prompt: also return the scores of the prompt's tokens. The prompt is then read without kept caches.
        writes: whether tokens are generated; False ends after the prompt.
        constraint: restricts the tokens.
        adapter: name of the adapter that writes it; None for the model itself.
    """

    top: int | None = None
    scores_prompt: bool = False
    writes: bool = True
    constraint: Constraint | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class Piece:
    """A piece of an answer. The last piece says how the answer ended.

    Attributes:
        text: new text; may be empty.
        finish: "stop" at an end token or a stop string, "length" at the token or time limit, "error" after a failure;
            None before the end.
        tokens: number of tokens generated so far.
        error: error message for the user.
        scores: scores of the new tokens, if requested. An end token is not among them.
        prompt_scores: scores of the prompt's tokens, in the first piece, if requested.
        ended_by: the stop string or the id of the stop token that ended the answer; None for the model's end tokens.
        cached: number of tokens of the prompt that were read for an earlier sequence.
    """

    text: str
    finish: Finish | None = None
    tokens: int = 0
    error: str = ""
    scores: tuple[Score, ...] = ()
    prompt_scores: tuple[Score, ...] = ()
    ended_by: str | int | None = None
    cached: int = 0


TEXT_ONLY = Wanted()
"""Only the text of an answer."""


class Sequence:
    """A prompt and its answer.

    Attributes:
        wanted: what the answer is wanted for.
        ids: prompt and generated token ids.
        read: number of tokens whose keys and values are in the cache.
        cache: the cache of the sequence; None until it has a slot.
        cancelled: whether the client no longer waits for it.
        cached: number of tokens of the prompt that the cache held at the start.
        leader: a sequence with the same prompt, which reads it for both; None if the sequence reads its own.
        asked, started, written: times of the request, its slot and its first token, in seconds of `time.monotonic`.
        gaps: seconds between each two tokens.

    Args:
        ids: token ids of the prompt.
        sampling: sampling settings and end conditions.
        on_piece: called with each piece, in the engine's thread. Must not raise.
        tokenizer: the tokenizer of the model.
        ends: the model's end tokens.
        seconds: time limit of the answer in seconds, from now.
        wanted: what the answer is wanted for.
    """

    def __init__(
        self,
        ids: list[int],
        sampling: Sampling,
        on_piece: Callable[[Piece], None],
        tokenizer: Any,
        ends: frozenset[int],
        seconds: float,
        wanted: Wanted = TEXT_ONLY,
    ) -> None:
        self.wanted, self._sampling = wanted, sampling
        self.ids = list(ids)
        self.prompt = len(self.ids)
        self.read = self.cached = 0
        self.cache: Any = None
        self.cancelled = False
        self.leader: Sequence | None = None
        constraint = wanted.constraint
        self._ends = sampling.ends(ends)
        self._sampler = Sampler(sampling, self.prompt, self._ends, constraint)
        self._stream = TextStream(tokenizer, sampling.stop, hidden_tokens({*ends, *self._ends}, tokenizer))
        self._scores: list[Score] = []
        self._prompt_scores = [Score(self.ids[0], None)] if wanted.scores_prompt else []
        self._scored = 1  # tokens of the prompt with a score
        self._on_piece = on_piece
        self.asked = time.monotonic()
        self.started: float | None = None
        self.written: float | None = None
        self.gaps: list[float] = []
        self._latest = 0.0
        self._until = self.asked + seconds

    @property
    def is_late(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() > self._until

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.ids) - self.prompt

    @property
    def is_scored(self) -> bool:
        """Whether the logits of every token that is read next are needed."""
        return self.wanted.scores_prompt and self._scored < self.prompt

    def part(self, most: int | None) -> Part:
        """Return the next tokens to read, at most `most`; None returns all remaining tokens, for one pass."""
        ids, sampler = self.ids[self.read : None if most is None else self.read + most], self._sampler
        is_last = self.read + len(ids) == len(self.ids)
        draw = sampler.draw(len(self.ids)) if is_last and sampler.draws_anywhere else None
        return Part(ids, self.read, self.cache, most is None, self.is_scored, self.wanted.adapter, draw, sampler)

    def begin(self, cache: Any) -> None:
        """Continue after the tokens that a cache holds."""
        self.cache, self.read = cache, cache.get_seq_length()
        if self.started is None:
            self.started, self.cached = time.monotonic(), self.read

    @property
    def is_reading(self) -> bool:
        """Whether it reads its prompt, and the last part is not read yet."""
        return self.cache is not None and self.read < self.prompt

    def can_follow(self, other: "Sequence") -> bool:
        """Return whether the other sequence reads the prompt, so that its keys, values and scores can be copied."""
        if self.wanted.scores_prompt != other.wanted.scores_prompt or self.wanted.adapter != other.wanted.adapter:
            return False
        is_scored_alike = not self.wanted.scores_prompt or self.wanted.top == other.wanted.top
        return other.is_reading and is_scored_alike and self.ids == other.ids

    def follow(self, cache: Any) -> None:
        """Continue with a copy of the leader's cache, as if the sequence had read the same parts."""
        leader, self.leader = self.leader, None
        assert leader is not None
        self.cache, self.read, self.cached, self.started = cache, leader.read, leader.cached, leader.started
        self._prompt_scores, self._scored = [*leader._prompt_scores], leader._scored

    @property
    def is_left_to_device(self) -> bool:
        """Whether a device can choose the next token, and nothing else is read from the logits."""
        chooses = self._sampler.is_greedy or self._sampler.draws_anywhere
        return chooses and self.wanted.top is None and self.wanted.constraint is None

    def take(self, part: Part, logits: torch.Tensor | Chosen) -> bool:
        """Process the logits of a part; return whether the sequence ended.

        Args:
            part: the part.
            logits: after the part, shape (vocabulary,); of a scored part, after each token, (tokens, vocabulary).
        """
        self.read += len(part.ids)
        known = None
        if isinstance(logits, Chosen):
            # The part may be a leader's, whose draw is not this sequence's.
            is_own = part.sampler is self._sampler if part.draw is not None else self._sampler.is_greedy
            known = logits.token if logits.token >= 0 and is_own else None
            logits = logits.logits
        if part.is_scored:
            self._score_prompt(part, logits)
            logits = logits[-1]
        if self.read < len(self.ids):
            return False
        if not self.wanted.writes:
            return self.finish("length")
        return self._write(logits, known)

    def _write(self, logits: torch.Tensor, known: int | None) -> bool:
        """Choose the next token, or take the one that is known; return whether the sequence ended."""
        token = self._sampler.choose(logits, self.ids) if known is None else known
        self.ids.append(token)
        self._note_time()
        if self.wanted.constraint and token not in self._ends:
            self.wanted.constraint.take(token)
        if self.wanted.top is not None and token not in self._ends:
            self._scores += _scores(logits[None], [token], self.wanted.top)
        text = self._stream.put([token])
        is_complete = self.wanted.constraint is not None and self.wanted.constraint.is_complete
        if token in self._ends or self._stream.stopped or is_complete:
            return self.finish("stop", text)
        if self.generated >= self._sampling.max_new_tokens:
            return self.finish("length", text)
        if text:
            self._emit(Piece(text))
        return False

    def _note_time(self) -> None:
        """Note the time of a token."""
        now = time.monotonic()
        if self.written is None:
            self.written = now
        else:
            self.gaps.append(now - self._latest)
        self._latest = now

    def finish(self, how: Finish, text: str = "", error: str = "") -> bool:
        """Emit the last piece and return True.

        A stop string found in text held back until now counts as the end. A failed sequence ends even if its last
        tokens cannot be decoded.
        """
        with suppress(Exception) if how == "error" else nullcontext():
            text += self._stream.end()
        how = "stop" if how == "length" and self._stream.stopped else how
        last = self.ids[-1] if self.generated else None
        ended_by = last if last in self._sampling.stop_token_ids else self._stream.found
        self._emit(Piece(text, how, error=error, ended_by=ended_by if how == "stop" else None))
        return True

    def _emit(self, piece: Piece) -> None:
        scores, self._scores = tuple(self._scores), []
        prompt_scores, self._prompt_scores = tuple(self._prompt_scores), []
        known = {"tokens": self.generated, "cached": self.cached, "scores": scores, "prompt_scores": prompt_scores}
        self._on_piece(replace(piece, **known))  # type: ignore[arg-type]

    def _score_prompt(self, part: Part, logits: torch.Tensor) -> None:
        """Score the tokens of the prompt that follow those of a part."""
        following = self.ids[self._scored : min(part.end + 1, self.prompt)]
        if following:  # a sequence that was begun anew has scores of its first tokens
            first = self._scored - part.position - 1
            self._prompt_scores += _scores(logits[first : first + len(following)], following, self.wanted.top or 0)
            self._scored += len(following)


def _scores(logits: torch.Tensor, tokens: list[int], top: int) -> list[Score]:
    """Return the scores of tokens from the logits before them, shape (tokens, vocabulary)."""
    logarithms = logits.float().log_softmax(-1)
    chosen = logarithms.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    if not top:
        return [Score(token, value) for token, value in zip(tokens, chosen, strict=True)]
    values, ids = logarithms.topk(min(top, logarithms.shape[1]), dim=-1)
    tops = [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return [Score(token, value, pairs) for token, value, pairs in zip(tokens, chosen, tops, strict=True)]

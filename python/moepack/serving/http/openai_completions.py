"""OpenAI's `/v1/completions`: one or several prompts, as text or tokens, with scores of the prompt on request."""

import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from fastapi import Request as HttpRequest
from pydantic import Field, field_validator

from moepack.serving.chat import grammar
from moepack.serving.http.answers import Answer, Answers, Running, event, streamed, usage
from moepack.serving.http.body import read
from moepack.serving.http.infill import infill_ids
from moepack.serving.http.refusal import Refusal
from moepack.serving.http.requests import MOST_CHOICES, NEUTRAL, wrong
from moepack.serving.http.structure import Structured
from moepack.serving.sequence import Score

__all__ = ["CompletionRequest", "completions"]

MOST_PROMPTS = 1024
"""Maximum prompts per request."""


class CompletionRequest(Structured):
    """A completion request. A prompt is text or token ids."""

    neutral: ClassVar = {**NEUTRAL, "logprobs": (False,), "add_special_tokens": (True,)}

    prompt: str | list[Any]
    max_tokens: int | None = Field(None, ge=0)
    best_of: int | None = Field(None, ge=1, le=MOST_CHOICES)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: str = ""

    @field_validator("prompt", mode="before")
    @classmethod
    def _text_or_tokens(cls, prompt: Any) -> Any:
        # Checked here because pydantic's errors for a union name its branches, which clients do not know.
        if _is_prompt(prompt) or (isinstance(prompt, list) and all(map(_is_prompt, prompt))):
            if not isinstance(prompt, str) and len(prompt) > MOST_PROMPTS and type(prompt[0]) is not int:
                raise wrong(f"must have at most {MOST_PROMPTS} prompts")
            return prompt
        raise wrong("must be a string, a list of tokens, or a list of these")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts."""
        if isinstance(self.prompt, list) and self.prompt and type(self.prompt[0]) is not int:
            return self.prompt
        return [self.prompt]

    @property
    def choices(self) -> int:
        """Number of answers to generate per prompt."""
        return self.best_of or self.n

    def check(self) -> None:
        """Reject fields that contradict each other."""
        for is_wrong, param, sentence in (
            (bool(self.suffix) and not all(isinstance(prompt, str) for prompt in self.prompts), "suffix",
             "requires prompts as text"),
            (bool(self.suffix) and self.echo, "suffix", "cannot be combined with echo"),
            (self.max_tokens == 0 and not self.echo, "max_tokens", "must be at least 1 without echo"),
            (self.choices < self.n, "best_of", "must be at least n"),
            (self.choices > self.n and self.stream, "best_of", "must equal n in a stream"),
        ):  # fmt: skip
            if is_wrong:
                raise Refusal(400, f"{param} {sentence}", "invalid_value", param=param)


async def completions(answers: Answers, request: HttpRequest) -> Any:
    """Answer a request."""
    body = await read(request, CompletionRequest)
    answers.require_model(body.model)
    body.check()
    prompts = [await _ids(answers, body, prompt) for prompt in body.prompts]
    shape = body.constraint()
    lark = None if shape is None else (shape[0], grammar.plain(shape[1]))
    await answers.compile(lark)
    ranks = body.choices > body.n
    running = answers.run(
        body, prompts, "prompt", top=0 if ranks and body.logprobs is None else body.logprobs,
        scores_prompt=body.echo and body.logprobs is not None, writes=body.max_tokens != 0,
        lark=lark,
    )  # fmt: skip
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()),
            "model": body.model}  # fmt: skip
    writer = _Writer(answers, body, prompts)
    if body.stream:
        return streamed(running, writer.events(running, head), lambda refusal: event(refusal.content))
    found = await running.whole(request)
    kept = _best(found, body.n, body.choices) if ranks else found
    choices = [writer.choice(index, answer) for index, answer in enumerate(kept)]
    return {**head, "choices": choices, "usage": usage(running, [answer.last for answer in found])}


class _Writer:
    """Writes the choices of a request."""

    def __init__(self, answers: Answers, body: CompletionRequest, prompts: list[list[int]]) -> None:
        self._answers, self._body, self._prompts = answers, body, prompts
        self._read: dict[int, tuple[Any, int]] = {}  # a decoder of UTF-8, and the number of characters so far

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Return a whole choice."""
        return self._part(index, answer.text, answer.prompt_scores, answer.scores, answer.last.finish, True)

    async def events(self, running: Running, head: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield the choices as they are written."""
        options, last, begun = self._body.stream_options, {}, set()
        async for index, piece in running.pieces():
            last[index] = piece
            is_first = index not in begun
            begun.add(index)
            part = self._part(index, piece.text, piece.prompt_scores, piece.scores, piece.finish, is_first)
            counts = {"usage": usage(running, list(last.values()))} if options.continuous_usage_stats else {}
            yield event({**head, "choices": [part], **counts})
        if options.include_usage:
            yield event({**head, "choices": [], "usage": usage(running, list(last.values()))})
        yield b"data: [DONE]\n\n"

    def _part(
        self, index: int, text: str, prompt: Any, scores: Any, finish: str | None, is_first: bool
    ) -> dict[str, Any]:
        """Return a choice, or a part of it. The first part holds the prompt, if it is echoed."""
        if self._body.echo and is_first:
            text = self._prompt_text(index) + text
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs(index, [*prompt, *scores])
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _prompt_text(self, index: int) -> str:
        prompt = self._body.prompts[index // self._body.n]
        if isinstance(prompt, str):
            return prompt
        text: str = self._answers.engine.tokenizer.decode(prompt, skip_special_tokens=False)
        return text

    def _logprobs(self, index: int, scores: list[Score]) -> dict[str, Any]:
        """Return OpenAI's lists of tokens, their logarithms and the likeliest tokens, which include the chosen one."""
        spell, bytes_of = self._answers.spelling.text_of, self._answers.spelling.bytes_of
        tokens = [spell(score.token) for score in scores]
        decoder, offset = self._read.get(index) or (getincrementaldecoder("utf-8")("replace"), 0)
        offsets = []
        for score in scores:
            offsets.append(offset)
            offset += len(decoder.decode(bytes_of(score.token)))
        self._read[index] = decoder, offset
        tops = [
            None
            if score.logprob is None
            else {**{spell(token): value for token, value in reversed(score.top)}, spell(score.token): score.logprob}
            for score in scores
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": tops if self._body.logprobs else None,
            "text_offset": offsets,
        }


async def _ids(answers: Answers, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
    """Return the token ids of a prompt. With a suffix, the answer also ends at the tokenizer's marks."""
    if not body.suffix:
        return await answers.ids(prompt, "prompt")
    assert isinstance(prompt, str)
    try:
        ids, ends = infill_ids(answers.engine.tokenizer, prompt, body.suffix, ("suffix", "suffix"))
    except ValueError as error:
        raise Refusal(400, str(error), "invalid_prompt", param="prompt") from error
    body.stop_token_ids = sorted({*body.stop_token_ids, *ends})
    return ids


def _is_prompt(prompt: Any) -> bool:
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and all(type(t) is int for t in prompt)
    )


def _best(found: list[Answer], n: int, of: int) -> list[Answer]:
    """Return the `n` answers of each prompt whose tokens have the highest mean log-probability."""
    kept: list[Answer] = []
    for first in range(0, len(found), of):
        ranked = sorted(found[first : first + of], key=lambda answer: -_mean(answer))
        kept += ranked[:n]
    return kept


def _mean(answer: Answer) -> float:
    values = [score.logprob or 0.0 for score in answer.scores]
    return sum(values) / len(values) if values else 0.0

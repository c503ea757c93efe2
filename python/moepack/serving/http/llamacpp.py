"""llama.cpp's HTTP API: `/completion`, `/infill`, `/props` and `/slots`.

Prompts are continued verbatim, without a chat template. `/v1/...` is shared with OpenAI's API.
"""

import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from fastapi import Request as HttpRequest
from pydantic import Field, field_validator

from moepack import __version__
from moepack.serving.chat import grammar
from moepack.serving.http.answers import Answer, Answers, Running, event, streamed
from moepack.serving.http.body import read
from moepack.serving.http.infill import File, infill_ids
from moepack.serving.http.llama_options import LlamaOptions
from moepack.serving.http.refusal import Refusal
from moepack.serving.http.requests import Fields, Sampled, wrong
from moepack.serving.http.structure import Structured
from moepack.serving.sequence import Piece, Score
from moepack.serving.text.prompts import prompt_ids

__all__ = ["completion", "infill", "props", "slots"]


class Generation(LlamaOptions):
    """The fields that both endpoints share. Those from `cache_prompt` on cannot change an answer."""

    neutral: ClassVar = {
        **LlamaOptions.neutral,
        "n_predict": (-1,),
        "n_keep": (0,),
        "n_discard": (0,),
        "n_indent": (0,),
        "t_max_predict_ms": (0, -1),
        "id_slot": (-1,),
        "grammar": ("",),
        "logit_bias": ([], {}),
        "lora": ([],),
        "post_sampling_probs": (False,),
        "return_progress": (False,),
        "response_fields": ([],),
        "stream_options": ({},),
    }

    forms: ClassVar = {**LlamaOptions.forms, "logit_bias": {"type": "array", "items": {"type": "array"}}}

    model: str | None = None
    n_predict: int | None = Field(None, ge=1)
    stream: bool = False
    n_probs: int = Field(0, ge=0, le=20)
    return_tokens: bool = False
    ignore_eos: bool = False
    logit_bias: dict[str, float] = Field({})
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    cache_prompt: bool = True
    timings_per_token: bool = False

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _pairs(cls, bias: Any) -> Any:
        """Take an object, or a list of pairs as llama.cpp does. `false` forbids a token."""
        pairs = list(bias.items()) if isinstance(bias, dict) else bias
        if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            raise wrong("must be an object, or a list of pairs of a token's id and its bias")
        return {str(token): -100.0 if value is False else value for token, value in pairs}

    def sampled(self, name: str, ends: list[int]) -> Structured:
        """Return the request in the form that `Answers.run` takes."""
        given = {"model": self.model or name, "max_tokens": self.n_predict, "stream": self.stream,
                 "ignore_eos": self.ignore_eos, "logit_bias": self.logit_bias, "stop_token_ids": ends,
                 "grammar": self.grammar, "json_schema": self.json_schema}  # fmt: skip
        return Structured.model_validate({**given, **self.sampling()})


class CompletionRequest(Generation):
    """A prompt to continue: text, or a list of texts and token ids, which are joined."""

    prompt: str | list[Any]

    @field_validator("prompt", mode="before")
    @classmethod
    def _text_or_tokens(cls, prompt: Any) -> Any:
        if isinstance(prompt, str) or (
            isinstance(prompt, list) and all(type(part) is int or isinstance(part, str) for part in prompt)
        ):
            return prompt
        raise wrong("must be a string, or a list of strings and tokens")


class ExtraFile(Fields):
    """Another file that the model may read."""

    filename: str = "file"
    text: str


class InfillRequest(Generation):
    """Texts around the answer. `prompt` follows the prefix."""

    neutral: ClassVar = {**Generation.neutral, "t_max_prompt_ms": (0, -1)}

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] = Field([])
    prompt: str = ""


async def completion(answers: Answers, request: HttpRequest) -> Any:
    """Continue a prompt."""
    body = await read(request, CompletionRequest)
    tokenizer = answers.engine.tokenizer
    if isinstance(body.prompt, str):
        return await _answer(answers, request, body, await answers.ids(body.prompt, "prompt"), body.prompt)
    ids: list[int] = []
    for part in body.prompt:
        if isinstance(part, int):
            ids.append(part)
        elif part:
            ids += await answers.ids(part, "prompt") if not ids else _more(tokenizer, part)
    prompt = "".join(part if isinstance(part, str) else tokenizer.decode([part]) for part in body.prompt)
    return await _answer(answers, request, body, await answers.ids(ids, "prompt"), prompt)


def _more(tokenizer: Any, text: str) -> list[int]:
    """Tokenize a later part of a prompt, which has no token at its start."""
    try:
        ids, start = prompt_ids(tokenizer, text), tokenizer("").input_ids
    except ValueError as error:
        raise Refusal(400, str(error), "invalid_prompt", param="prompt") from error
    return ids[len(start) :] if start and ids[: len(start)] == start else ids


async def infill(answers: Answers, request: HttpRequest) -> Any:
    """Fill in the middle of a text."""
    body = await read(request, InfillRequest)
    files = [File(file.filename, file.text) for file in body.input_extra]
    prefix = body.input_prefix + body.prompt
    try:
        params = ("input_suffix", "input_extra")
        ids, ends = infill_ids(answers.engine.tokenizer, prefix, body.input_suffix, params, files)
    except ValueError as error:
        raise Refusal(400, str(error), "invalid_prompt", param="input_prefix") from error
    return await _answer(answers, request, body, ids, prefix, ends)


async def _answer(
    answers: Answers, request: HttpRequest, body: Generation, ids: list[int], prompt: str, ends: list[int] | None = None
) -> Any:
    started = time.monotonic()
    sampled = body.sampled(answers.settings.name, ends or [])
    answers.require_model(sampled.model)
    shape = sampled.constraint()
    top = body.n_probs if body.n_probs or body.return_tokens else None
    lark = None if shape is None else (shape[0], grammar.plain(shape[1]))
    await answers.compile(lark)
    running = answers.run(sampled, [ids], "prompt", top=top, lark=lark)
    writer = _Writer(answers, body, sampled, prompt, len(ids), started)
    if body.stream:
        return streamed(running, writer.events(running), lambda refusal: event(refusal.content))
    (found,) = await running.whole(request)
    return writer.whole(found)


class _Writer:
    """Writes an answer in llama.cpp's form."""

    def __init__(
        self, answers: Answers, body: Generation, sampled: Sampled, prompt: str, count: int, started: float
    ) -> None:
        self._answers, self._body, self._sampled = answers, body, sampled
        self._prompt, self._count, self._started = prompt, count, started
        self._first: float | None = None

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return a whole answer."""
        return {**self._part(answer.text, answer.scores, answer.last), **self._end(answer.last, answer.text)}

    async def events(self, running: Running) -> AsyncIterator[bytes]:
        """Yield the pieces of an answer; the last has no text and says how it ended."""
        text = ""
        async for _, piece in running.pieces():
            self._first = self._first or time.monotonic()
            text += piece.text
            if piece.text or piece.scores:
                yield event(self._part(piece.text, list(piece.scores), piece))
            if piece.finish is not None:
                yield event({**self._part("", [], piece), **self._end(piece, text)})

    def _part(self, text: str, scores: list[Score], piece: Piece) -> dict[str, Any]:
        part = {
            "index": 0,
            "content": text,
            "tokens": [score.token for score in scores] if self._body.return_tokens else [],
            "id_slot": -1,
            "stop": False,
            "tokens_predicted": piece.tokens,
            "tokens_evaluated": self._count,
        }
        if self._body.n_probs and scores:
            part["completion_probabilities"] = [self._probability(score) for score in scores]
        if self._body.timings_per_token:
            part["timings"] = self._timings(piece)
        return part

    def _probability(self, score: Score) -> dict[str, Any]:
        top = [self._token(token, value) for token, value in score.top]
        return {**self._token(score.token, score.logprob), "top_logprobs": top}

    def _token(self, token: int, value: float | None) -> dict[str, Any]:
        spelling = self._answers.spelling
        return {"id": token, "token": spelling.text_of(token), "bytes": list(spelling.bytes_of(token)),
                "logprob": value}  # fmt: skip

    def _end(self, last: Piece, text: str) -> dict[str, Any]:
        word = last.ended_by if isinstance(last.ended_by, str) else ""
        kind = "limit" if last.finish == "length" else "word" if word else "eos"
        return {
            "stop": True,
            "stop_type": kind,
            "stopping_word": word,
            "model": self._sampled.model,
            "prompt": self._prompt,
            "generation_settings": self._sampled.model_dump(exclude_unset=True, exclude={"model"}),
            "has_new_line": "\n" in text,
            "truncated": False,
            "tokens_cached": last.cached,
            "timings": self._timings(last),
        }

    def _timings(self, piece: Piece) -> dict[str, Any]:
        """Return milliseconds and rates. An answer that is not streamed knows only their sum."""
        now = time.monotonic()
        first = self._first or now
        read, written = 1000 * (first - self._started), 1000 * (now - first)
        return {
            "cache_n": piece.cached,
            "prompt_n": self._count - piece.cached,
            "prompt_ms": read,
            "predicted_n": piece.tokens,
            "predicted_ms": written,
            "predicted_per_second": 1000 * (piece.tokens - 1) / written if written and piece.tokens > 1 else None,
        }


def props(answers: Answers) -> dict[str, Any]:
    """Return the properties of the server."""
    engine, settings = answers.engine, answers.settings
    tokenizer = engine.tokenizer
    template = settings.template or tokenizer.chat_template or ""
    return {
        "default_generation_settings": {"n_ctx": engine.context, "params": dict(settings.sampling)},
        "total_slots": engine.slots,
        "model_alias": settings.name,
        "model_path": settings.name,
        "chat_template": template.get("default", "") if isinstance(template, dict) else template,
        "bos_token": tokenizer.bos_token or "",
        "eos_token": tokenizer.eos_token or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"moepack {__version__}",
        "is_sleeping": False,
    }


def slots(answers: Answers) -> list[dict[str, Any]]:
    """Return the slots, the busy ones first. They reveal no prompts."""
    engine = answers.engine
    active = engine.counts()["active"]
    return [
        {"id": number, "n_ctx": engine.context, "speculative": False, "is_processing": number < active}
        for number in range(engine.slots)
    ]

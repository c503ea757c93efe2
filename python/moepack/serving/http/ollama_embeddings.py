"""ollama's `/api/embed` and its former `/api/embeddings`: hidden states after the last norm, means of all tokens."""

import time
from typing import Any, ClassVar

from fastapi import Request as HttpRequest
from pydantic import Field, field_validator

from moepack.serving.http.answers import Answers
from moepack.serving.http.body import read
from moepack.serving.http.ollama import Options, known
from moepack.serving.http.openai_embeddings import MOST, require_width, vector
from moepack.serving.http.refusal import Refusal
from moepack.serving.http.requests import TEXT, Fields, wrong
from moepack.serving.reading import Reading

__all__ = ["EmbedRequest", "EmbeddingsRequest", "embed", "embeddings"]


class Embedded(Fields):
    """The fields of both requests. `keep_alive` and options other than `num_ctx` cannot change a vector."""

    model: str
    options: Options = Options.model_validate({})
    keep_alive: Any = None


class EmbedRequest(Embedded):
    """Texts. Those beyond the context lose their ends, unless `truncate` is false."""

    forms: ClassVar = {"input": TEXT}

    input: list[str]
    truncate: bool = True
    dimensions: int | None = Field(None, ge=1)

    @field_validator("input", mode="before")
    @classmethod
    def _one_or_many(cls, given: Any) -> Any:
        texts = given if isinstance(given, list) else [given]
        if not all(isinstance(text, str) for text in texts):
            raise wrong("must be a string or a list of strings")
        if len(texts) > MOST:
            raise wrong(f"must have at most {MOST} texts")
        return texts


class EmbeddingsRequest(Embedded):
    """A text."""

    prompt: str


async def embed(answers: Answers, request: HttpRequest) -> dict[str, Any]:
    """Return the vectors of texts, of length 1."""
    body, started = await read(request, EmbedRequest), time.monotonic_ns()
    require_width(answers, body.dimensions)
    texts = [await _ids(answers, body, text, "input", body.truncate) for text in body.input]
    return {
        "model": body.model,
        "embeddings": [await _vector(answers, body, ids, normalize=True) for ids in texts],
        "total_duration": time.monotonic_ns() - started,
        "load_duration": 0,
        "prompt_eval_count": sum(map(len, texts)),
    }


async def embeddings(answers: Answers, request: HttpRequest) -> dict[str, Any]:
    """Return the vector of a text, as it is."""
    body = await read(request, EmbeddingsRequest)
    ids = await _ids(answers, body, body.prompt, "prompt", truncate=True)
    return {"embedding": await _vector(answers, body, ids, normalize=False)}


async def _ids(answers: Answers, body: Embedded, text: str, param: str, truncate: bool) -> list[int]:
    """Return the tokens of a text that fit the context."""
    known(answers, body.model)
    body.options.require_context(answers)
    most, ids = body.options.num_ctx or answers.engine.context, await answers.ids(text, param)
    if len(ids) > most and not truncate:
        message = f"the context is {most} tokens; the {param} has {len(ids)}"
        raise Refusal(400, message, "context_length_exceeded", param=param)
    return ids[:most]


async def _vector(answers: Answers, body: Embedded, ids: list[int], normalize: bool) -> list[float]:
    """Return the vector of tokens."""
    reading = Reading(ids, "mean", answers.adapter(known(answers, body.model)))
    numbers: list[float] = (await vector(answers, reading, normalize)).float().tolist()
    return numbers

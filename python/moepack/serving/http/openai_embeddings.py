"""OpenAI's `/v1/embeddings`: hidden states after the last norm, as the mean of all tokens or of the last one."""

import asyncio
import base64
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from fastapi import Request as HttpRequest
from pydantic import Field, field_validator

from moepack.serving.engine import ClosedError, QueueFullError
from moepack.serving.http.answers import Answers
from moepack.serving.http.body import read
from moepack.serving.http.refusal import Refusal
from moepack.serving.http.requests import Fields, wrong
from moepack.serving.reading import Reading

__all__ = ["embeddings", "require_width", "vector"]

MOST = 2048
"""Maximum texts per request, as at OpenAI."""


class EmbeddingRequest(Fields):
    """An embedding request. An input is text or token ids. `pooling` and `normalize` are moepack's."""

    neutral: ClassVar = {"add_special_tokens": (True,), "embd_normalize": (2,), "priority": (0,)}

    model: str
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    user: str = ""

    @field_validator("input", mode="before")
    @classmethod
    def _text_or_tokens(cls, given: Any) -> Any:
        is_many = isinstance(given, list) and bool(given) and type(given[0]) is not int
        texts = given if is_many else [given]
        if len(texts) > MOST:
            raise wrong(f"must have at most {MOST} texts")
        if not all(isinstance(text, str) or _is_tokens(text) for text in texts):
            raise wrong("must be a string, a list of tokens, or a list of these")
        return texts


async def embeddings(answers: Answers, request: HttpRequest) -> dict[str, Any]:
    """Return the vectors of texts."""
    body = await read(request, EmbeddingRequest)
    answers.require_model(body.model)
    require_width(answers, body.dimensions)
    texts = [await answers.ids(text, "input") for text in body.input]
    for ids in texts:
        if len(ids) > answers.engine.context:
            message = f"the context is {answers.engine.context} tokens; the input has {len(ids)}"
            raise Refusal(400, message, "context_length_exceeded", param="input")
    data = []
    for index, ids in enumerate(texts):
        found = await vector(answers, Reading(ids, body.pooling, answers.adapter(body.model)), body.normalize)
        data.append({"object": "embedding", "index": index, "embedding": _written(found, body.encoding_format)})
    count = sum(map(len, texts))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


def require_width(answers: Answers, dimensions: int | None) -> None:
    """Reject vectors of another width than the model's."""
    width = answers.engine.model.config.get_text_config(decoder=True).hidden_size
    if dimensions not in (None, width):
        message = f"dimensions must be {width}, the width of the model, because its states cannot be shortened"
        raise Refusal(400, message, "invalid_value", param="dimensions")


async def vector(answers: Answers, reading: Reading, normalize: bool) -> torch.Tensor:
    """Return the vector of a text. The reading is dropped if the client disconnects.

    Args:
        answers: the engine.
        reading: the text.
        normalize: return a vector of length 1.
    """
    state = await _read(answers, reading)
    if not bool(state.isfinite().all()):
        raise Refusal(503, "the model's hidden states are not finite", "engine_error", "server_error")
    return torch.nn.functional.normalize(state, dim=0) if normalize else state


async def _read(answers: Answers, reading: Reading) -> torch.Tensor:
    """Let the engine read a text."""
    try:
        answers.engine.read(reading)
        return await asyncio.wait_for(asyncio.wrap_future(reading.result), answers.engine.seconds)
    except QueueFullError as error:
        raise Refusal(429, str(error), "queue_full", "rate_limit_error") from error
    except ClosedError as error:
        raise Refusal(503, str(error), "closed", "server_error") from error
    except TimeoutError as error:
        raise Refusal(503, "the server was too busy to answer in time", "engine_error", "server_error") from error
    except ValueError as error:  # a token without a row in the embedding
        raise Refusal(400, str(error), "invalid_prompt", param="input") from error
    finally:
        reading.cancelled = True


def _written(vector: torch.Tensor, encoding: str) -> list[float] | str:
    """Return a vector as numbers, or as base64 of little-endian float32."""
    values = vector.numpy().astype(np.float32)
    if encoding == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode()
    return [float(value) for value in values]


def _is_tokens(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(token) is int for token in given)

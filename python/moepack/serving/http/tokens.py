"""`/tokenize` and `/detokenize`, with the fields of vLLM and llama.cpp, whose paths are the same."""

import asyncio
from typing import Any

from fastapi import Request as HttpRequest
from pydantic import Field

from moepack.serving.http.answers import Answers
from moepack.serving.http.body import read
from moepack.serving.http.chats import Turn, prepare
from moepack.serving.http.openai_chat import Message, Tool
from moepack.serving.http.refusal import Refusal
from moepack.serving.http.requests import Fields
from moepack.serving.text.prompts import text_ids

__all__ = ["detokenize", "tokenize"]


class TokenizeRequest(Fields):
    """Messages, or a text: as `prompt` (vLLM), with special tokens, or as `content` (llama.cpp), without."""

    model: str = ""
    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] = Field([], max_length=512)
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool = True
    return_token_strs: bool = False
    with_pieces: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field({})


class DetokenizeRequest(Fields):
    """Tokens."""

    model: str = ""
    tokens: list[int]


async def tokenize(answers: Answers, request: HttpRequest) -> dict[str, Any]:
    """Return the tokens of a text or of a chat."""
    body = await read(request, TokenizeRequest)
    if body.model:
        answers.require_model(body.model)
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        message = "one of prompt, content and messages is required"
        raise Refusal(400, message, "missing_required_parameter", param=given[1] if given else "prompt")
    ids = await (_chat_ids(answers, body) if body.messages else _text_ids(answers, body, given[0]))
    found: dict[str, Any] = {"count": len(ids), "max_model_len": answers.engine.context, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [answers.spelling.text_of(token) for token in ids]
    if body.with_pieces:
        found["tokens"] = [{"id": token, "piece": _piece(answers, token)} for token in ids]
    return found


async def _text_ids(answers: Answers, body: TokenizeRequest, param: str) -> list[int]:
    text = body.prompt if body.prompt is not None else body.content or ""
    asked = body.add_special_tokens if body.add_special_tokens is not None else body.add_special
    special = asked if asked is not None else body.prompt is not None
    try:
        return await asyncio.to_thread(
            text_ids, answers.engine.tokenizer, text, special=special, controls=body.parse_special
        )
    except ValueError as error:
        raise Refusal(400, str(error), "invalid_prompt", param=param) from error


async def _chat_ids(answers: Answers, body: TokenizeRequest) -> list[int]:
    for number, message in enumerate(body.messages or []):
        message.check(f"messages[{number}]")
    turn = Turn(
        [message.plain() for message in body.messages or []],
        [tool.plain() for tool in body.tools],
        variables=body.chat_template_kwargs,
        opens_answer=body.add_generation_prompt and not body.continue_final_message,
        continues=body.continue_final_message,
        params={"variables": "chat_template_kwargs"},
    )
    return (await prepare(answers, turn)).ids


def _piece(answers: Answers, token: int) -> str | list[int]:
    """Return the text of a token, or its bytes if they are no text, as llama.cpp does."""
    data = answers.spelling.bytes_of(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(answers: Answers, request: HttpRequest) -> dict[str, Any]:
    """Return the text of tokens, as `prompt` (vLLM) and `content` (llama.cpp)."""
    body = await read(request, DetokenizeRequest)
    if body.model:
        answers.require_model(body.model)
    tokenizer = answers.engine.tokenizer
    unknown = next((token for token in body.tokens if not 0 <= token < len(tokenizer)), None)
    if unknown is not None:
        message = f"tokens has the token {unknown}: ids must be between 0 and {len(tokenizer) - 1}"
        raise Refusal(400, message, "invalid_value", param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return {"prompt": text, "content": text}

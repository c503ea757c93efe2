"""OpenAI's HTTP API for an `Engine`: models, completions and chats, streamed or not.

All input is bounded before work begins: the size of a body, the tokens of prompt and answer, the number of waiting
requests, the time of a request. Endpoints accept only the fields of their body.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, Request

from moepack.serving.engine import Engine
from moepack.serving.http.answers import CHAT, COMPLETION, Answers
from moepack.serving.http.body import read
from moepack.serving.http.bounds import Bounds, has_key
from moepack.serving.http.refusal import Refusal, report_errors
from moepack.serving.http.requests import ChatRequest, CompletionRequest
from moepack.serving.http.settings import Settings
from moepack.serving.text.prompts import has_template

__all__ = ["Settings", "create_app"]


def create_app(engine: Engine, settings: Settings) -> FastAPI:
    """Return the application, which starts and closes the engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(
        title="moepack", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False,
        dependencies=[Depends(_take_nothing_else)],
    )  # fmt: skip
    app.add_middleware(Bounds, settings=settings)
    report_errors(app)
    answers = Answers(engine, settings)
    created = int(time.time())
    entry = {"id": settings.name, "object": "model", "created": created, "owned_by": "moepack"}

    @app.get("/health")
    async def health(request: Request) -> dict[str, Any]:
        if not engine.is_open:
            raise Refusal(503, "the server is shutting down", "closed", "server_error")
        return {"status": "ok", **(engine.counts() if has_key(request, settings) else {})}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        answers.require_model(name)
        return entry

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        body = await read(request, CompletionRequest)
        return await answers.answer(request, body, "prompt", body.prompt, COMPLETION)

    @app.post("/v1/chat/completions")
    async def chats(request: Request) -> Any:
        body = await read(request, ChatRequest)
        if not has_template(engine.tokenizer):
            raise Refusal(400, "the model has no chat template: use /v1/completions", "no_chat_template")
        return await answers.answer(request, body, "messages", [message.plain() for message in body.messages], CHAT)

    return app


async def _take_nothing_else(request: Request) -> None:
    """Reject query parameters and the body of a GET, which no endpoint reads."""
    for name in request.query_params:
        raise Refusal(
            400, f"{name} is not supported: query parameters are not accepted", "unsupported_parameter", param=name
        )
    if request.method == "GET" and await request.body():
        raise Refusal(400, "a GET request must not have a body", "unsupported_body")

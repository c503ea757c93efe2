"""OpenAI's interface over HTTP to an `Engine`: models, completions and chats, whole or streamed.

Everything from outside is bounded before work begins: the size of a body, the tokens of a prompt and its answer, the
requests that wait, the time that one takes.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.trustedhost import TrustedHostMiddleware

from moepack.runtime.prompts import has_template
from moepack.serving.answers import CHAT, COMPLETION, Answers
from moepack.serving.bounds import Bounds
from moepack.serving.engine import Engine
from moepack.serving.refusal import Refusal, report_errors
from moepack.serving.requests import ChatRequest, CompletionRequest
from moepack.serving.settings import Settings

__all__ = ["Settings", "create_app"]


def create_app(engine: Engine, settings: Settings) -> FastAPI:
    """Return the application; it starts the engine and closes it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(title="moepack", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Bounds, settings=settings)
    if settings.hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(settings.hosts))
    report_errors(app)
    answers = Answers(engine, settings)
    created = int(time.time())
    entry = {"id": settings.name, "object": "model", "created": created, "owned_by": "moepack"}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        if not engine.is_open:
            raise Refusal(503, "the server shuts down", "closed", "server_error")
        return {"status": "ok", **engine.counts()}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        answers.require_model(name)
        return entry

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Any:
        return await answers.answer(request, body, body.prompt, COMPLETION)

    @app.post("/v1/chat/completions")
    async def chats(body: ChatRequest, request: Request) -> Any:
        if not has_template(engine.tokenizer):
            raise Refusal(400, "the model has no chat template: use /v1/completions", "no_chat_template")
        return await answers.answer(request, body, [message.plain() for message in body.messages], CHAT)

    return app

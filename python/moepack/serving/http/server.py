"""The HTTP application for an `Engine`: one table of endpoints, and what all of them share.

All input is bounded before work begins: the size of a body, the tokens of prompt and answer, the number of waiting
requests, the time of a request. Endpoints accept only the fields of their body.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, Request

from moepack.serving.engine import Engine
from moepack.serving.http import llamacpp, ollama, ollama_embeddings, openapi
from moepack.serving.http.answers import Answers
from moepack.serving.http.anthropic_messages import count_tokens, messages
from moepack.serving.http.bounds import Bounds, has_key
from moepack.serving.http.models import entries
from moepack.serving.http.openai_chat import chats
from moepack.serving.http.openai_completions import completions
from moepack.serving.http.openai_embeddings import embeddings
from moepack.serving.http.openai_responses import responses
from moepack.serving.http.origins import Origins
from moepack.serving.http.page import add_page
from moepack.serving.http.refusal import Refusal, report_errors
from moepack.serving.http.settings import Settings
from moepack.serving.http.tokens import detokenize, tokenize

__all__ = ["POST", "Settings", "create_app"]

POST: dict[str, Callable[[Answers, Request], Awaitable[Any]]] = {
    "/v1/completions": completions,
    "/v1/chat/completions": chats,
    "/v1/responses": responses,
    "/v1/embeddings": embeddings,
    "/v1/messages": messages,
    "/v1/messages/count_tokens": count_tokens,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/completion": llamacpp.completion,
    "/infill": llamacpp.infill,
    "/api/chat": ollama.chat,
    "/api/generate": ollama.generate,
    "/api/show": ollama.show,
    "/api/embed": ollama_embeddings.embed,
    "/api/embeddings": ollama_embeddings.embeddings,
}
"""The endpoints that take a body."""

GET: dict[str, Callable[[Answers], Any]] = {
    "/metrics": lambda answers: answers.metrics.response(),
    "/openapi.json": lambda answers: openapi.description(answers.models),
    "/props": llamacpp.props,
    "/slots": llamacpp.slots,
    "/api/tags": ollama.tags,
    "/api/ps": ollama.running_models,
    "/api/version": lambda answers: {"version": ollama.VERSION},
}
"""The endpoints that describe the server."""


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
    app.add_middleware(Origins, settings=settings)
    report_errors(app)
    answers = Answers(engine, settings)

    @app.get("/health")
    async def health(request: Request) -> dict[str, Any]:
        if not engine.is_open:
            raise Refusal(503, "the server is shutting down", "closed", "server_error")
        return {"status": "ok", **(engine.counts() if has_key(request, settings) else {})}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": entries(answers)}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        answers.require_model(name)
        return next(entry for entry in entries(answers) if entry["id"] == name)

    for path, handler in POST.items():
        app.post(path)(_bound(handler, answers))
    for path, description in GET.items():
        app.get(path)(_described(description, answers))
    add_page(app)
    return app


def _bound(handler: Callable[[Answers, Request], Awaitable[Any]], answers: Answers) -> Callable[..., Awaitable[Any]]:
    """Return a handler of a path."""

    async def answer(request: Request) -> Any:
        return await handler(answers, request)

    return answer


def _described(description: Callable[[Answers], Any], answers: Answers) -> Callable[[], Awaitable[Any]]:
    """Return a description as the handler of a path."""

    async def answer() -> Any:
        return description(answers)

    return answer


async def _take_nothing_else(request: Request) -> None:
    """Reject query parameters and the body of a GET, which no endpoint reads."""
    for name in request.query_params:
        if name == "beta" and request.url.path.startswith("/v1/messages"):
            continue  # Anthropic's clients add it; it does not change an answer
        raise Refusal(
            400, f"{name} is not supported: query parameters are not accepted", "unsupported_parameter", param=name
        )
    if request.method == "GET" and await request.body():
        raise Refusal(400, "a GET request must not have a body", "unsupported_body")

"""OpenAI's interface over HTTP to an `Engine`: models, completions and chats, whole or streamed.

Everything from outside is bounded before work begins: the size of a body, the tokens of a prompt and its answer, the
requests that wait, the time that one takes. An answer that nobody waits for any more gives back its slot. Bodies must
be declared as JSON: browsers then ask before a page of another site may send one, and nothing here tells them they may.
"""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moepack.runtime.prompts import Prompt, has_template, prompt_ids
from moepack.runtime.sampling import Sampling
from moepack.serving.engine import Engine, QueueFullError
from moepack.serving.requests import ChatRequest, CompletionRequest
from moepack.serving.sequence import Piece, Sequence

__all__ = ["Settings", "create_app", "fingerprint"]

JSON_TYPE = "application/json"


@dataclass(frozen=True)
class Settings:
    """Of a server.

    Attributes:
        name: of the model, as clients call it.
        source: the model's directory, whose files must stay what they were; None for a model that has none.
        api_key: what clients must send; None lets everybody in.
        answer: tokens of an answer where the client does not say.
        body: the most bytes of a request.
        hosts: names that the server may be asked by, so that no page can reach it under a name of its own (DNS
            rebinding); empty for any.
    """

    name: str
    source: Path | None = None
    api_key: str | None = None
    answer: int = 512
    body: int = 4 << 20
    hosts: tuple[str, ...] = ()


class Refusal(Exception):
    """An answer of OpenAI's form that says what is wrong."""

    def __init__(self, status: int, message: str, code: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.content = {"error": {"message": message, "type": kind, "param": None, "code": code}}

    def response(self) -> JSONResponse:
        """The answer over HTTP."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.content, self.status, headers)


@dataclass(frozen=True)
class _Kind:
    """How the answers of completions and of chats differ."""

    prefix: str
    whole: str
    chunk: str
    choice: Callable[[str], dict[str, Any]]
    part: Callable[[str], dict[str, Any]]


_COMPLETION = _Kind("cmpl", "text_completion", "text_completion", lambda t: {"text": t}, lambda t: {"text": t})
_CHAT = _Kind(
    *("chatcmpl", "chat.completion", "chat.completion.chunk"),
    choice=lambda text: {"message": {"role": "assistant", "content": text}},
    part=lambda text: {"delta": {"role": "assistant", "content": text} if text else {}},
)


def create_app(engine: Engine, settings: Settings) -> FastAPI:
    """Return the application; it starts the engine and closes it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(title="moepack", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Bounds, settings=settings)
    if settings.hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(settings.hosts))
    _report_errors(app)
    answers = _Answers(engine, settings)
    created = int(time.time())
    entry = {"id": settings.name, "object": "model", "created": created, "owned_by": "moepack"}

    @app.get("/health")
    async def health() -> dict[str, Any]:
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
        return await answers.answer(request, body, body.prompt, _COMPLETION)

    @app.post("/v1/chat/completions")
    async def chats(body: ChatRequest, request: Request) -> Any:
        if not has_template(engine.tokenizer):
            raise Refusal(400, "the model has no chat template: use /v1/completions", "no_chat_template")
        return await answers.answer(request, body, [message.plain() for message in body.messages], _CHAT)

    return app


class _Answers:
    """Turns requests into sequences of the engine, and their pieces into answers."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self._fingerprint = fingerprint(settings.source)

    def require_model(self, name: str) -> None:
        """Refuse names of other models, and go on only while the files are what was loaded."""
        if name != self.settings.name:
            message = f"there is no model '{name}', only '{self.settings.name}'"
            raise Refusal(404, message, "model_not_found")
        if fingerprint(self.settings.source) != self._fingerprint:
            message = "the model's files have changed since they were loaded: restart the server"
            raise Refusal(503, message, "model_changed", "server_error")

    async def answer(self, request: Request, body: Any, prompt: Prompt | list[int], kind: _Kind) -> Any:
        """Answer a request, whole or streamed."""
        self.require_model(body.model)
        ids = await self._ids(prompt)
        pieces, sequence = self._submit(ids, self._sampling(body, len(ids)))
        head = {"id": f"{kind.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.settings.name}
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            events = self._events(pieces, sequence, {**head, "object": kind.chunk}, kind, usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        text, last = await self._whole(request, pieces, sequence)
        choice = {"index": 0, **kind.choice(text), "logprobs": None, "finish_reason": last.finish}
        return {**head, "object": kind.whole, "choices": [choice], "usage": _usage(sequence, last)}

    async def _ids(self, prompt: Any) -> list[int]:
        """The prompt's tokens."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            vocabulary = self.engine.model.config.get_text_config(decoder=True).vocab_size
            if not all(0 <= token < vocabulary for token in prompt):
                raise Refusal(400, f"tokens are between 0 and {vocabulary - 1}", "invalid_prompt")
            return prompt
        try:
            return await asyncio.to_thread(prompt_ids, self.engine.tokenizer, prompt or "")
        except ValueError as error:
            raise Refusal(400, str(error), "invalid_prompt") from error

    def _sampling(self, body: Any, prompt: int) -> Sampling:
        """How the answer is made; refused where it would go beyond the context."""
        room = self.engine.context - prompt
        wanted = getattr(body, "max_completion_tokens", None) or body.max_tokens
        if room < 1 or (wanted or 1) > room:
            asked = f"{prompt} tokens of prompt" + (f" and {wanted} of answer" if wanted else "")
            message = f"the model takes {self.engine.context} tokens in all, not {asked}"
            raise Refusal(400, message, "context_length_exceeded")
        tokens = wanted or min(self.settings.answer, room)
        return Sampling.of_model(self.engine.model, **body.settings(), max_new_tokens=tokens)

    def _submit(self, ids: list[int], sampling: Sampling) -> "tuple[asyncio.Queue[Piece], Sequence]":
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hand_over(piece: Piece) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        try:
            return pieces, self.engine.submit(ids, sampling, hand_over)
        except QueueFullError as error:
            raise Refusal(429, str(error), "queue_full", "rate_limit_error") from error

    async def _whole(self, request: Request, pieces: "asyncio.Queue[Piece]", sequence: Sequence) -> tuple[str, Piece]:
        """Wait for the whole answer, unless the client hangs up."""
        whole, gone = asyncio.ensure_future(_join(pieces)), asyncio.ensure_future(_hung_up(request))
        try:
            await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise Refusal(499, "the client has hung up", "client_closed_request")
            text, last = whole.result()
        finally:
            self.engine.cancel(sequence)
            whole.cancel()
            gone.cancel()
        if last.finish == "error":
            raise Refusal(503, last.error, "engine_error", "server_error")
        return text, last

    async def _events(
        self, pieces: "asyncio.Queue[Piece]", sequence: Sequence, head: dict[str, Any], kind: _Kind, usage: bool
    ) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        try:
            finish = None
            while finish is None:
                piece = await pieces.get()
                finish = piece.finish
                if finish == "error":
                    yield _event(Refusal(503, piece.error, "engine_error", "server_error").content)
                    return
                choice = {"index": 0, **kind.part(piece.text), "logprobs": None, "finish_reason": finish}
                yield _event({**head, "choices": [choice]})
            if usage:
                yield _event({**head, "choices": [], "usage": _usage(sequence, piece)})
            yield "data: [DONE]\n\n"
        finally:
            self.engine.cancel(sequence)


async def _join(pieces: "asyncio.Queue[Piece]") -> tuple[str, Piece]:
    """The whole text, and the last piece."""
    texts = []
    while True:
        piece = await pieces.get()
        texts.append(piece.text)
        if piece.finish is not None:
            return "".join(texts), piece


async def _hung_up(request: Request) -> None:
    """Wait until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _usage(sequence: Sequence, last: Piece) -> dict[str, int]:
    prompt, answer = sequence.prompt, last.tokens
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def fingerprint(source: Path | None) -> tuple[Any, ...]:
    """Return what tells whether the files of a model are still those: their places, sizes and times."""
    if source is None:
        return ()
    try:
        files = [*sorted(source.glob("*.safetensors")), source / "config.json"]
        states = [(file.name, file.stat()) for file in files]
    except OSError:
        return ("missing",)
    return tuple((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states)


def _report_errors(app: FastAPI) -> None:
    """Let every refusal have OpenAI's form, FastAPI's own included."""

    @app.exception_handler(Refusal)
    async def refusal(request: Request, error: Refusal) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body" and first["type"] != "json_invalid")
        message = f"{place}: {first['msg']}" if place else first["msg"]
        return Refusal(400, message, first["type"]).response()

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        return Refusal(error.status_code, str(error.detail), "http_error").response()


class _Bounds:
    """Lets in who has the key, sends JSON, and not too much of it."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as ASGI asks."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope)
        refusal = self._refusal(request)
        body = b"" if refusal else await self._body(receive)
        if body is None:
            refusal = Refusal(413, f"a request has at most {self.settings.body} bytes", "too_large")
        if refusal is not None:
            return await refusal.response()(scope, receive, send)
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        return await self.app(scope, replay, send)

    def _refusal(self, request: Request) -> Refusal | None:
        key, given = self.settings.api_key, request.headers.get("authorization", "")
        if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            return Refusal(401, "the API key is missing or wrong", "invalid_api_key", "authentication_error")
        if request.method == "POST" and request.headers.get("content-type", "").split(";")[0].strip() != JSON_TYPE:
            return Refusal(415, f"a request's content-type is {JSON_TYPE}", "content_type")
        return None

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None where it is too large or the client has gone."""
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self.settings.body:
                return None
        return b"".join(parts)

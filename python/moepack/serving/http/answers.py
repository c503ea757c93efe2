"""Converts requests to sequences of the engine, and their pieces to responses in OpenAI's format, streamed or not.

If the client disconnects, the answer releases its slot. A failure after a stream has started is its last event.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from moepack.errors import CheckpointError, LoadError
from moepack.format.weights import weight_files
from moepack.serving.engine import ClosedError, Engine, QueueFullError
from moepack.serving.http.refusal import Refusal, defect
from moepack.serving.http.settings import Settings
from moepack.serving.sequence import Piece, Sequence
from moepack.serving.text.prompts import Prompt, prompt_ids
from moepack.serving.text.sampling import Sampling

__all__ = ["CHAT", "COMPLETION", "Answers", "fingerprint"]

_ESCAPED = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Characters of a JSON string that some clients treat as line ends, which would end an event."""

_LOG = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class Kind:
    """The differences between responses of completions and of chats."""

    prefix: str
    whole: str
    chunk: str
    choice: Callable[[str], dict[str, Any]]
    part: Callable[[str], dict[str, Any]]


COMPLETION = Kind("cmpl", "text_completion", "text_completion", lambda t: {"text": t}, lambda t: {"text": t})
CHAT = Kind(
    *("chatcmpl", "chat.completion", "chat.completion.chunk"),
    choice=lambda text: {"message": {"role": "assistant", "content": text}},
    part=lambda text: {"delta": {"role": "assistant", "content": text} if text else {}},
)


class Answers:
    """Converts requests to sequences of the engine, and their pieces to responses.

    Raises:
        LoadError: generation_config.json has values out of range, so that every request would fail.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self._fingerprint = fingerprint(settings.source)
        try:
            Sampling.of_model(engine.model)
        except ValueError as error:
            raise LoadError(f"generation_config.json: {error}") from error

    def require_model(self, name: str) -> None:
        """Reject the names of other models, and all requests after the model's files have changed."""
        if name != self.settings.name:
            message = f"there is no model '{name}', only '{self.settings.name}'"
            raise Refusal(404, message, "model_not_found", param="model")
        if fingerprint(self.settings.source) != self._fingerprint:
            message = "the model's files have changed since they were loaded: restart the server"
            raise Refusal(503, message, "model_changed", "server_error")

    async def answer(self, request: Request, body: Any, field: str, prompt: Prompt | list[int], kind: Kind) -> Any:
        """Answer a request, streamed or not. `field` is the name of the prompt in the request."""
        self.require_model(body.model)
        try:
            ids = await self._ids(prompt)
            pieces, sequence = self._submit(ids, self._sampling(body, field, len(ids)))
        except ValueError as error:  # the settings have been checked, so the prompt is at fault
            raise Refusal(400, str(error), "invalid_prompt", param=field) from error
        head = {"id": f"{kind.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.settings.name}
        if body.stream:
            usage = body.stream_options.include_usage
            events = self._events(pieces, sequence, {**head, "object": kind.chunk}, kind, usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        text, last = await self._whole(request, pieces, sequence)
        choice = {"index": 0, **kind.choice(text), "logprobs": None, "finish_reason": last.finish}
        return {**head, "object": kind.whole, "choices": [choice], "usage": _usage(sequence, last)}

    async def _ids(self, prompt: Any) -> list[int]:
        """Return the token ids of the prompt.

        Raises:
            ValueError: the prompt cannot be tokenized for this model.
        """
        if isinstance(prompt, list) and not isinstance(next(iter(prompt), 0), dict):
            if not prompt:
                raise ValueError("the prompt has no tokens")
            return prompt
        return await asyncio.to_thread(prompt_ids, self.engine.tokenizer, prompt)

    def _sampling(self, body: Any, field: str, prompt: int) -> Sampling:
        """Return the sampling settings. Reject a request that exceeds the context."""
        room = self.engine.context - prompt
        if room < 1 or (body.length or 1) > room:
            asked = f"{prompt} prompt tokens" + (f" and {body.length} answer tokens" if body.length else "")
            message = f"the context is {self.engine.context} tokens; the request needs {asked}"
            raise Refusal(400, message, "context_length_exceeded", param=field)
        tokens = body.length or min(self.settings.answer, room)
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
        except ClosedError as error:
            raise Refusal(503, str(error), "closed", "server_error") from error

    async def _whole(self, request: Request, pieces: "asyncio.Queue[Piece]", sequence: Sequence) -> tuple[str, Piece]:
        """Wait for the whole answer, or until the client disconnects."""
        whole, gone = asyncio.ensure_future(_join(pieces)), asyncio.ensure_future(_hung_up(request))
        try:
            await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise Refusal(499, "the client has disconnected", "client_closed_request")
            text, last = whole.result()
        finally:
            self.engine.cancel(sequence)
            whole.cancel()
            gone.cancel()
        if last.finish == "error":
            raise _failure(last)
        return text, last

    async def _events(
        self, pieces: "asyncio.Queue[Piece]", sequence: Sequence, head: dict[str, Any], kind: Kind, usage: bool
    ) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events."""
        try:
            finish = None
            while finish is None:
                piece = await pieces.get()
                finish = piece.finish
                if finish == "error":
                    raise _failure(piece)
                choice = {"index": 0, **kind.part(piece.text), "logprobs": None, "finish_reason": finish}
                yield _event({**head, "choices": [choice]})
            if usage:
                yield _event({**head, "choices": [], "usage": _usage(sequence, piece)})
            yield b"data: [DONE]\n\n"
        except Refusal as refusal:
            yield _event(refusal.content)
        except Exception:
            _LOG.exception("a stream failed")
            yield _event(defect().content)
        finally:
            self.engine.cancel(sequence)


async def _join(pieces: "asyncio.Queue[Piece]") -> tuple[str, Piece]:
    """Return the whole text and the last piece."""
    texts = []
    while True:
        piece = await pieces.get()
        texts.append(piece.text)
        if piece.finish is not None:
            return "".join(texts), piece


async def _hung_up(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _failure(last: Piece) -> Refusal:
    """Return the refusal for an answer that failed."""
    return Refusal(503, last.error, "engine_error", "server_error")


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False).translate(_ESCAPED)}\n\n".encode()


def _usage(sequence: Sequence, last: Piece) -> dict[str, int]:
    prompt, answer = sequence.prompt, last.tokens
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def fingerprint(source: Path | None) -> tuple[Any, ...]:
    """Return the names, inodes, sizes and times of a model's files, to detect changes."""
    if source is None:
        return ()
    try:
        files = [source / name for name in (*weight_files(source), "config.json")]
        states = [(file.name, file.stat()) for file in files]
    except (OSError, CheckpointError):
        return ("missing",)
    return tuple((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states)

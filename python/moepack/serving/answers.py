"""Turns requests into sequences of the engine, and their pieces into answers of OpenAI's form, whole or streamed.

An answer that nobody waits for any more gives back its slot.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from moepack.errors import CheckpointError
from moepack.format.weights import weight_files
from moepack.runtime.prompts import Prompt, prompt_ids
from moepack.runtime.sampling import Sampling
from moepack.serving.engine import ClosedError, Engine, QueueFullError
from moepack.serving.refusal import Refusal
from moepack.serving.sequence import Piece, Sequence
from moepack.serving.settings import Settings

__all__ = ["CHAT", "COMPLETION", "Answers", "fingerprint"]


@dataclass(frozen=True)
class Kind:
    """How the answers of completions and of chats differ."""

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

    async def answer(self, request: Request, body: Any, prompt: Prompt | list[int], kind: Kind) -> Any:
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
        except ClosedError as error:
            raise Refusal(503, str(error), "closed", "server_error") from error

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
        self, pieces: "asyncio.Queue[Piece]", sequence: Sequence, head: dict[str, Any], kind: Kind, usage: bool
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
        files = [source / name for name in (*weight_files(source), "config.json")]
        states = [(file.name, file.stat()) for file in files]
    except (OSError, CheckpointError):
        return ("missing",)
    return tuple((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states)

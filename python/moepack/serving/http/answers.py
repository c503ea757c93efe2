"""Runs the sequences of a request in the engine, for every protocol: checks, admission, waiting, streaming.

If the client disconnects, its sequences release their slots. A failure after a stream has started is its last event.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse

from moepack.errors import CheckpointError, LoadError
from moepack.format.weights import weight_files
from moepack.serving.constraint import Budget, Budgeted, Grammars
from moepack.serving.engine import ClosedError, Engine, QueueFullError
from moepack.serving.http.handover import Handover, handover_of
from moepack.serving.http.metrics import Metrics
from moepack.serving.http.refusal import Refusal, defect
from moepack.serving.http.requests import Sampled
from moepack.serving.http.settings import Settings
from moepack.serving.sequence import Constraint, Piece, Score, Sequence, Wanted
from moepack.serving.spelling import Spelling
from moepack.serving.text.prompts import has_variable, prompt_ids
from moepack.serving.text.sampling import Sampling

__all__ = ["Answer", "Answers", "Running", "event", "fingerprint", "streamed", "usage"]

_ESCAPED = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Characters of a JSON string that some clients treat as line ends, which would end an event."""

_LOG = logging.getLogger("uvicorn.error")


@dataclass
class Answer:
    """A whole answer.

    Attributes:
        text: its text.
        last: its last piece.
        scores: scores of its tokens, if requested.
        prompt_scores: scores of the prompt's tokens, if requested.
    """

    text: str
    last: Piece
    scores: list[Score] = field(default_factory=list)
    prompt_scores: list[Score] = field(default_factory=list)


class Running:
    """The sequences that answer one HTTP request.

    Attributes:
        sequences: the sequences, in the order of the answers.
        prompt: number of tokens of the prompts. A prompt with several answers counts once.
        limit: the number of answer tokens that fits the context if the request asks for more; None otherwise.
        begun: the time of the first piece, in nanoseconds of the monotonic clock; None before.
    """

    def __init__(
        self,
        engine: Engine,
        handover: Handover,
        asked: Ordered[tuple[list[int], Sampling, Wanted]],
        limit: int | None = None,
        ended: Callable[[Sequence, Piece | None], None] = lambda sequence, last: None,
    ) -> None:
        self._engine, self.limit, self._ended = engine, limit, ended
        self._left: set[int] = set()
        self.begun: int | None = None
        self.prompt = sum({id(ids): len(ids) for ids, _, _ in asked}.values())
        self._pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self.sequences: list[Sequence] = []
        try:
            for index, (ids, sampling, wanted) in enumerate(asked):
                self.sequences.append(engine.submit(ids, sampling, self._receiver(handover, index), wanted))
        except QueueFullError as error:
            self.cancel()
            raise Refusal(429, str(error), "queue_full", "rate_limit_error") from error
        except ClosedError as error:
            self.cancel()
            raise Refusal(503, str(error), "closed", "server_error") from error
        except BaseException:
            self.cancel()
            raise

    def _receiver(self, handover: Handover, index: int) -> Callable[[Piece], None]:
        put = self._pieces.put_nowait  # no reference to self, which would be a cycle with its sequences
        return lambda piece: handover.add(put, (index, piece))

    def cancel(self) -> None:
        """Release the slots of all sequences."""
        for index, sequence in enumerate(self.sequences):
            self._engine.cancel(sequence)
            if index not in self._left:
                self._leave(index, None)

    def _leave(self, index: int, last: Piece | None) -> None:
        """Count a sequence that has ended."""
        self._left.add(index)
        self._ended(self.sequences[index], last)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield the pieces of all answers with the answer's index, until all have ended.

        Raises:
            Refusal: an answer failed.
        """
        left = len(self.sequences)
        while left:
            index, piece = await self._pieces.get()
            self.begun = self.begun or time.monotonic_ns()
            if piece.finish is not None:
                self._leave(index, piece)
            if piece.finish == "error":
                raise Refusal(503, piece.error, "engine_error", "server_error")
            left -= piece.finish is not None
            yield index, piece

    async def whole(self, request: HttpRequest) -> list[Answer]:
        """Return all answers.

        Raises:
            Refusal: an answer failed, or the client has disconnected.
        """
        whole, gone = asyncio.ensure_future(self._join()), asyncio.ensure_future(_hung_up(request))
        try:
            await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise Refusal(499, "the client has disconnected", "client_closed_request")
            return whole.result()
        finally:
            self.cancel()
            whole.cancel()
            gone.cancel()

    async def _join(self) -> list[Answer]:
        found: dict[int, list[Piece]] = {}
        async for index, piece in self.pieces():
            found.setdefault(index, []).append(piece)
        return [_joined(found[index]) for index in sorted(found)]


class Answers:
    """The engine and the settings, as the protocols use them.

    Attributes:
        engine: the engine.
        settings: the settings of the server.
        grammars: the grammars for the model's vocabulary.
        spelling: the bytes of tokens.
        metrics: counts and times of all answers.
        created: time of the start, in seconds since 1970.

    Raises:
        LoadError: generation_config.json has values out of range, so that every request would fail.
        ValueError: the chat template does not use a variable of the settings, or an adapter has the model's name.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.created = int(time.time())
        self._fingerprint = fingerprint(settings.source)
        self.grammars = Grammars(engine.tokenizer, engine.logits, engine.ends)
        self.spelling = Spelling(engine.tokenizer)
        self.metrics = Metrics(engine, settings.name)
        try:
            Sampling.of_model(engine.model)
        except ValueError as error:
            raise LoadError(f"generation_config.json: {error}") from error
        if settings.name in engine.adapters.names:
            raise ValueError(f"'{settings.name}' is the name of the model, so an adapter needs another")
        template = settings.template or str(engine.tokenizer.chat_template or "")
        unused = next((name for name in settings.variables if not has_variable(template, name)), None)
        if unused is not None:
            raise ValueError(f"the chat template does not use the variable '{unused}'")

    @property
    def models(self) -> list[str]:
        """The names that requests may use as `model`."""
        return [self.settings.name, *self.engine.adapters.names]

    def adapter(self, name: str) -> str | None:
        """Return the adapter that a model's name stands for; None for the model itself."""
        return None if name == self.settings.name else name

    def require_model(self, name: str) -> None:
        """Reject the names of other models, and all requests after the model's files have changed."""
        if name not in self.models:
            known = " and ".join(f"'{each}'" for each in self.models)
            message = f"there is no model '{name}', only {known}"
            raise Refusal(404, message, "model_not_found", param="model")
        if fingerprint(self.settings.source) != self._fingerprint:
            message = "the model's files have changed since they were loaded: restart the server"
            raise Refusal(503, message, "model_changed", "server_error")

    async def ids(self, prompt: str | list[int], param: str) -> list[int]:
        """Return the token ids of a prompt."""
        if isinstance(prompt, list):
            if not prompt:
                raise Refusal(400, "the prompt has no tokens", "invalid_prompt", param=param)
            return prompt
        try:
            return await asyncio.to_thread(prompt_ids, self.engine.tokenizer, prompt)
        except ValueError as error:
            raise Refusal(400, str(error), "invalid_prompt", param=param) from error

    def run(
        self, body: Sampled, prompts: Ordered[list[int]], param: str, *,
        top: int | None = None, scores_prompt: bool = False, writes: bool = True, lark: tuple[str, str] | None = None,
        budget: Budget | None = None,
    ) -> Running:  # fmt: skip
        """Start the answers to prompts, `body.choices` for each.

        Args:
            body: the request.
            prompts: token ids.
            param: the name of the prompt in the request.
            top: return scores with this many of the likeliest tokens; None returns no scores.
            scores_prompt: also score the prompt's tokens.
            writes: generate tokens.
            lark: the field that constrains the answers, and the grammar.
            budget: bounds the tokens of reasoning.
        """
        most = self.engine.slots + self.engine.queue
        if len(prompts) * body.choices > most:
            message = f"the request asks for {len(prompts) * body.choices} answers; the server takes at most {most}"
            raise Refusal(400, message, "too_many_answers", param="n" if len(prompts) == 1 else param)
        asked, limit = [], None
        for ids in prompts:
            sampling, fits = self._sampling(body, param, len(ids))
            limit = limit if fits is None else fits
            for number in range(body.choices):
                seed = None if sampling.seed is None else (sampling.seed + number + 2**63) % 2**64 - 2**63
                constraint: Constraint | None = None if lark is None else self.compiled(*lark)
                if budget is not None:
                    constraint = Budgeted(budget, self.engine.logits, constraint)
                wanted = Wanted(top, scores_prompt, writes, constraint, self.adapter(body.model))
                asked.append((ids, replace(sampling, seed=seed), wanted))
        try:
            return Running(self.engine, handover_of(self.engine), asked, limit, self.metrics.end)
        except ValueError as error:  # the settings have been checked, so the prompt is at fault
            raise Refusal(400, str(error), "invalid_prompt", param=param) from error

    async def compile(self, lark: tuple[str, str] | None) -> None:
        """Compile a grammar before `run`, in a thread, because it can take a second.

        Raises:
            Refusal: the grammar is not valid.
        """
        if lark is not None:
            await asyncio.to_thread(self.compiled, *lark)

    def compiled(self, param: str, lark: str) -> Any:
        """Return the constraint of one answer, from the field that asks for it and a grammar.

        Raises:
            Refusal: the grammar is not valid.
        """
        try:
            return self.grammars.compiled(lark)
        except ValueError as error:
            raise Refusal(400, f"{param} is not valid: {error}", "invalid_grammar", param=param) from error

    def _sampling(self, body: Sampled, param: str, prompt: int) -> tuple[Sampling, int | None]:
        """Return the sampling settings, and the maximum length if it is below the requested one.

        Raises:
            Refusal: the prompt leaves no room for an answer, or a setting contradicts another.
        """
        room = self.engine.context - prompt
        if room < 1:
            message = f"the context is {self.engine.context} tokens; the request needs {prompt} prompt tokens"
            raise Refusal(400, message, "context_length_exceeded", param=param)
        wanted = body.length or max(self.settings.answer, body.min_tokens)
        settings = body.settings()
        self._require_tokens("logit_bias", [token for token, _ in settings["logit_bias"]])
        self._require_tokens("stop_token_ids", settings["stop_token_ids"])
        length = min(wanted, room)
        if body.min_tokens > length:
            message = f"min_tokens must be at most the length of the answer, {length} tokens"
            raise Refusal(400, message, "invalid_value", param="min_tokens")
        chosen = {**self.settings.sampling, **{name: value for name, value in settings.items() if value is not None}}
        sampling = Sampling.of_model(self.engine.model, **chosen, max_new_tokens=length)
        return sampling, length if body.length and body.length > room else None

    def _require_tokens(self, param: str, ids: Ordered[int]) -> None:
        unknown = next((token for token in ids if token >= self.engine.logits), None)
        if unknown is not None:
            message = f"{param} has the token {unknown}: ids must be between 0 and {self.engine.logits - 1}"
            raise Refusal(400, message, "invalid_value", param=param)


SILENCE = 15.0
"""Seconds after which a stream without a first piece sends a comment: clients and proxies give up on silent ones."""


def streamed(
    running: Running,
    events: AsyncIterator[bytes],
    failed: Callable[[Refusal], bytes],
    kind: str = "text/event-stream",
    alive: bytes = b": the prompt is being read\n\n",
) -> StreamingResponse:
    """Return the response that sends events, and a last one if the answer fails.

    Args:
        running: the answers, which are cancelled at the end.
        events: the events.
        failed: returns the event for a failure.
        kind: content type of the response.
        alive: sent while the prompt is read; empty to send nothing.
    """

    async def guarded() -> AsyncIterator[bytes]:
        try:
            if alive:
                async for one in _begun(running, events, alive):
                    yield one
            async for one in events:
                yield one
        except Refusal as refusal:
            yield failed(refusal)
        except Exception:
            _LOG.exception("a stream failed")
            yield failed(defect())
        finally:
            running.cancel()

    return StreamingResponse(guarded(), media_type=kind, headers={"Cache-Control": "no-cache"})


async def _begun(running: Running, events: AsyncIterator[bytes], alive: bytes) -> AsyncIterator[bytes]:
    """Yield the events up to the first one with a piece, and signs of life in longer silences."""
    while running.begun is None:
        following = asyncio.ensure_future(anext(events, b""))
        try:
            while not (await asyncio.wait({following}, timeout=SILENCE))[0]:
                yield alive
        finally:
            following.cancel()
        if not following.result():
            return
        yield following.result()


def event(content: dict[str, Any], name: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(content, ensure_ascii=False).translate(_ESCAPED)}\n\n".encode()


def usage(running: Running, last: Ordered[Piece]) -> dict[str, Any]:
    """Return OpenAI's usage of a request from the last pieces of its answers. Shared prompts count once.

    `max_tokens` is present if the request asked for more tokens than the context has.
    """
    prompt, answer = running.prompt, sum(piece.tokens for piece in last)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": max((piece.cached for piece in last), default=0)},
    }
    return counts if running.limit is None else {**counts, "max_tokens": running.limit}


def _joined(pieces: list[Piece]) -> Answer:
    """Return the whole answer of pieces."""
    scores = [score for piece in pieces for score in piece.scores]
    prompt_scores = [score for piece in pieces for score in piece.prompt_scores]
    return Answer("".join(piece.text for piece in pieces), pieces[-1], scores, prompt_scores)


async def _hung_up(request: HttpRequest) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


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

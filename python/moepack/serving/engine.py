"""Steps all sequences of a model together, in a thread of its own.

Sequences wait in a queue of fixed length, then take one of the slots until they end. Each step reads one token of every
sequence that has been read to its end, and up to `CHUNK` tokens of prompts, the oldest first, in one forward pass
(`moepack.serving.step`). Keys and values of ended sequences are kept, as long as slots are free, for prompts that begin
alike: the next turn of a chat reads only what is new.

Invariants: only the engine's thread touches the model, the slots and the caches; a sequence's last piece, and no other,
says how it ended; sequences that failed, came late or were cancelled give back their slot before the next step. An
exception ends the sequence that caused it and no other, unless a GPU is lost.
"""

import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from moepack.errors import LoadError, MoepackError, NonFiniteError
from moepack.runtime.backends.gpu import lost
from moepack.runtime.finite import non_finite
from moepack.runtime.prefix import Prefix, new_cache
from moepack.runtime.prompts import positions
from moepack.runtime.sampling import Sampling
from moepack.runtime.text import end_strings, end_tokens
from moepack.runtime.vocabulary import require_head, require_known, vocabulary_of
from moepack.serving.isolation import Part
from moepack.serving.sequence import Piece, Sequence
from moepack.serving.step import Stepper

__all__ = ["ClosedError", "Engine", "QueueFullError"]

CHUNK = 512
"""Tokens of prompts in a step: more read faster, and let those who are answered already wait longer."""
WORTH = 16
"""Tokens that a kept cache must save to be used."""


class QueueFullError(Exception):
    """There is no room for another request."""


class ClosedError(Exception):
    """No more requests are taken."""


class Engine:
    """A model that answers many at a time.

    Attributes:
        context: the most tokens of a sequence, prompt included.

    Args:
        model: a loaded decoder, on one device, which from now on belongs to the engine.
        tokenizer: its tokenizer.
        slots: the most sequences of a step; with `context` it bounds the memory of keys and values.
        queue: the most sequences that wait for a slot.
        context: the most tokens of a sequence; None takes what the model was made for.
        seconds: the most time of an answer, waiting included.

    Raises:
        LoadError: the model is an encoder-decoder.
        UnsupportedModelError: it predicts no tokens.
    """

    def __init__(
        self, model: Any, tokenizer: Any, slots: int = 16, queue: int = 256, context: int | None = None,
        seconds: float = 600.0,
    ) -> None:  # fmt: skip
        if model.config.is_encoder_decoder:
            raise LoadError("only decoders are served: this model reads one text and writes another")
        require_head(model)
        self.model, self.tokenizer = model, tokenizer
        self.slots, self.queue, self.seconds = slots, queue, seconds
        limit = positions(model)
        self.context = min(value for value in (context, limit, 1 << 30) if value is not None)
        self._stepper = Stepper(model, self._relieve)
        self._vocabulary = vocabulary_of(model)
        self._ends = end_tokens(model, tokenizer)
        self._stop = end_strings(model)
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []
        self._kept: deque[Prefix] = deque()
        self._changed = threading.Condition()
        self._closing = math.inf  # when answers must have ended
        self._thread = threading.Thread(target=self._run, name="moepack-engine", daemon=True)

    def start(self) -> "Engine":
        """Begin to answer."""
        self._thread.start()
        return self

    def submit(self, ids: list[int], sampling: Sampling, on_piece: Callable[[Piece], None]) -> Sequence:
        """Queue a prompt.

        Args:
            ids: its tokens; with `sampling.max_new_tokens` at most `context`.
            sampling: how tokens are chosen, and when the text ends.
            on_piece: takes the pieces, in the engine's thread; must not raise.

        Raises:
            TokenError: the model's embedding has no row for a token.
            QueueFullError: too many wait already.
            ClosedError: the engine is closed.
        """
        require_known(ids, self._vocabulary, self.tokenizer)
        sampling = replace(sampling, stop=(*sampling.stop, *self._stop))
        with self._changed:
            if not self.is_open:
                raise ClosedError("the server shuts down")
            if len(self._waiting) >= self.queue:
                raise QueueFullError(f"{self.queue} requests wait already")
            sequence = Sequence(ids, sampling, on_piece, self.tokenizer, self._ends, self.seconds)
            self._waiting.append(sequence)
            self._changed.notify()
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Give up a sequence: it hands out nothing more, unless it is just ending, and gives its place back."""
        with self._changed:
            sequence.cancelled = True
            if sequence in self._waiting:
                self._waiting.remove(sequence)

    def counts(self) -> dict[str, int]:
        """Return how many sequences are answered, wait, and are kept."""
        return {"active": len(self._active), "waiting": len(self._waiting), "kept": len(self._kept)}

    @property
    def is_open(self) -> bool:
        """Whether requests are taken."""
        return self._closing == math.inf

    def close(self, patience: float = 0.0) -> None:
        """Take no more; let answers go on for so many seconds, then end them, and the thread; again is a no-op."""
        with self._changed:
            self._closing = min(self._closing, time.monotonic() + patience)
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._end()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._admit():
                    self._leave()
                    if self._active:
                        self._step()
        finally:  # whatever ended it: nobody is left waiting
            self._end()

    def _end(self) -> None:
        with self._changed:
            self._closing = min(self._closing, time.monotonic())
            left = [*self._active, *self._waiting]
            self._active, self._kept = [], deque()
            self._waiting.clear()
        for sequence in left:
            sequence.finish("error", error="the server shuts down")

    def _admit(self) -> bool:
        """Give free slots to those who wait longest; wait while there is nobody. Whether the engine goes on."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_open or self._waiting or self._active)
            if not self.is_open:
                return bool(self._active) and time.monotonic() < self._closing
            free = self.slots - len(self._active)
            admitted = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        self._active += admitted
        for sequence in admitted:
            with self._answered(sequence):
                sequence.begin(self._cache(sequence))
        while self._kept and len(self._kept) + len(self._active) > self.slots:
            self._kept.popleft()
        return True

    def _cache(self, sequence: Sequence) -> Any:
        """A cache for a sequence: of one that began alike, if it is worth it."""
        best = max(self._kept, key=lambda prefix: prefix.shared(sequence.ids), default=None)
        if best is None or best.shared(sequence.ids) < WORTH:
            return new_cache(self.model)
        self._kept.remove(best)
        return best.continued(sequence.ids)

    def _leave(self) -> None:
        """Take the slots of those that nobody waits for, or whose time is over."""
        for sequence in [sequence for sequence in self._active if sequence.cancelled or sequence.is_late]:
            if sequence.cancelled:
                self._active.remove(sequence)
            elif len(sequence.ids) == sequence.prompt:
                self._active.remove(sequence)
                sequence.finish("error", error="the server was too busy to answer in time")
            else:
                with self._answered(sequence):
                    sequence.finish("length")
                    self._active.remove(sequence)

    def _parts(self) -> list[tuple[Sequence, Part]]:
        """What the model reads next: a token of each sequence, and of prompts what fits into a chunk."""
        parts, room = [], CHUNK
        for sequence in self._active:
            if self._stepper.begins_anew(sequence.read, len(sequence.ids)):
                sequence.begin(new_cache(self.model))
            is_prompt = len(sequence.ids) - sequence.read > 1
            if is_prompt and room <= 0:
                continue
            is_whole = is_prompt and self._stepper.reads_whole(len(sequence.ids))
            part = sequence.part(None if is_whole else room if is_prompt else 1)
            room -= len(part.ids) if is_prompt else 0
            parts.append((sequence, part))
        return parts

    def _step(self) -> None:
        parts = self._parts()
        try:
            outcomes = self._stepper.forward([part for _, part in parts])
        except Exception as error:
            for sequence, _ in parts:
                self._fail(sequence, error)
            if failure := lost(error):
                raise failure from error
            return
        for (sequence, part), outcome in zip(parts, outcomes, strict=True):
            with self._answered(sequence):
                if isinstance(outcome, Exception):
                    raise outcome
                if sequence.take(part, outcome):
                    self._active.remove(sequence)
                    self._keep(Prefix(sequence.ids[: sequence.read], sequence.cache, self._stepper.limit))

    def _relieve(self) -> bool:
        """Give up what is kept for later prompts; whether there was something."""
        kept = bool(self._kept)
        self._kept.clear()
        if kept and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return kept

    @contextmanager
    def _answered(self, sequence: Sequence) -> Iterator[None]:
        """Answer an exception to the sequence that it is of, and go on."""
        try:
            yield
        except Exception as error:
            self._fail(sequence, error)

    def _located(self, sequence: Sequence, error: NonFiniteError) -> Exception:
        """The error of a sequence whose logits are not finite, with the layer."""
        try:
            return non_finite(self.model, {"input_ids": torch.tensor([sequence.ids[: sequence.read]])})
        except Exception:  # there is no memory to read it again
            return error

    def _keep(self, prefix: Prefix) -> None:
        if prefix.is_useful:
            self._kept.append(prefix)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        if isinstance(error, NonFiniteError):
            error = self._located(sequence, error)
        foreseen = isinstance(error, MoepackError)
        if foreseen:
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        if sequence in self._active:  # it has not had its end yet
            self._active.remove(sequence)
            sequence.finish("error", error=str(error) if foreseen else f"the model failed: {type(error).__name__}")

"""Steps all sequences of a model together, in a separate thread.

Sequences wait in a bounded queue, then occupy a slot until they end. Each step runs one forward pass
(`moepack.serving.step`) over one token of every sequence whose prompt is read, and up to `CHUNK` prompt tokens, oldest
sequence first. Answers wait for a burst of short prompts (`BURST`). While slots are free, keys and values of ended
sequences are kept for prompts with the same beginning, so the next turn of a chat reads only the new tokens. A prompt
that several sequences wait for is read once: the others get copies of its keys and values. On a GPU, the next step may
begin before the results of the last one are read, if all answers are greedy.

Invariants: Only the engine's thread accesses the model, the slots and the caches. Only the last piece of a sequence
says how it ended. Sequences that failed, timed out or were cancelled release their slot before the next step. A
sequence without a slot holds no keys and values, however long its client refers to it. An exception ends only the
sequence that caused it, unless a GPU is lost.
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

from moepack.backends.gpu import lost
from moepack.decoding.finite import non_finite
from moepack.decoding.prefix import Prefix, forked, new_cache
from moepack.decoding.vocabulary import require_head, require_known, vocabulary_of
from moepack.errors import LoadError, MoepackError, NonFiniteError
from moepack.serving.adapters import Adapters
from moepack.serving.isolation import Outcome, Part
from moepack.serving.reading import Reading
from moepack.serving.sequence import TEXT_ONLY, Piece, Sequence, Wanted
from moepack.serving.step import Flight, Stepper
from moepack.serving.text.prompts import positions
from moepack.serving.text.sampling import Sampling
from moepack.serving.text.stream import end_strings, end_tokens

__all__ = ["ClosedError", "Engine", "QueueFullError"]

CHUNK = 512
"""Prompt tokens per step. More do not read prompts faster, and delay the running answers."""
BURST = 2048
"""Answers wait while several prompts with together up to this many tokens are read, at most `BURST / CHUNK - 1` steps.
In a burst of 64 prompts of 26 tokens, answers would take 10 % of the time until the last first token."""
SCORED = 128
"""Prompt tokens per step of a sequence whose prompt is scored, because logits take 4 bytes per token of the vocabulary:
77 MB for 128 tokens of a vocabulary of 150,000."""
WORTH = 16
"""Minimum number of tokens that a kept cache must save to be used."""


_Flown = tuple[list[tuple[Sequence, Part]], Flight]
"""The sequences of a step that the device runs, with their parts."""


class QueueFullError(Exception):
    """The queue is full."""


class ClosedError(Exception):
    """The engine is closed and accepts no requests."""


class Engine:
    """Generates several answers concurrently with one model.

    Attributes:
        context: maximum number of tokens of a sequence, including the prompt.
        vocabulary: number of rows of the embedding; None if it is unknown.
        logits: number of logits.
        ends: tokens that end an answer.
        on_step: called when all sequences have got the pieces of a step, and at the end; must not raise. Usually in the
            engine's thread.

    Args:
        model: a loaded decoder on one device. The engine takes ownership.
        tokenizer: the tokenizer of the model.
        slots: maximum number of sequences per step. Together with `context`, it bounds the memory of keys and values.
        queue: maximum number of sequences waiting for a slot.
        context: maximum number of tokens of a sequence; None uses the model's limit.
        seconds: maximum time of an answer in seconds, including waiting.
        adapters: adapters of the model that sequences may use.
        deterministic: compute every sequence as if it were alone, to the last bit: in passes of its own, with its
            prompt in chunks of a fixed size and without keys and values of other prompts.

    Raises:
        LoadError: the model is an encoder-decoder.
        UnsupportedModelError: the model has no head that predicts tokens.
    """

    def __init__(
        self, model: Any, tokenizer: Any, slots: int = 16, queue: int = 256, context: int | None = None,
        seconds: float = 600.0, adapters: Adapters | None = None, deterministic: bool = False,
    ) -> None:  # fmt: skip
        if model.config.is_encoder_decoder:
            raise LoadError("only decoder models can be served, but this model is an encoder-decoder")
        require_head(model)
        self.model, self.tokenizer = model, tokenizer
        self.slots, self.queue, self.seconds = slots, queue, seconds
        limit = positions(model)
        self.context = min(value for value in (context, limit, 1 << 30) if value is not None)
        self.adapters = adapters or Adapters(model)
        self.deterministic = deterministic
        self._stepper = Stepper(model, self._relieve, self.adapters, deterministic)
        self._stepper.prepare(slots, self.context)
        self.vocabulary = vocabulary_of(model)
        self.logits: int = model.config.get_text_config(decoder=True).vocab_size
        self.ends = end_tokens(model, tokenizer)
        self.on_step: Callable[[], None] = lambda: None
        self._stop = end_strings(model)
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []
        self._readings: deque[Reading] = deque()
        self._kept: deque[Prefix] = deque()
        self._changed = threading.Condition()
        self._closing = math.inf  # when answers must have ended
        self._flight: _Flown | None = None  # a step that the device runs
        self._paused = 0  # steps in a row for which answers have waited
        self._thread = threading.Thread(target=self._run, name="moepack-engine", daemon=True)

    def start(self) -> "Engine":
        """Start the engine's thread."""
        self._thread.start()
        return self

    def submit(
        self, ids: list[int], sampling: Sampling, on_piece: Callable[[Piece], None], wanted: Wanted = TEXT_ONLY
    ) -> Sequence:
        """Queue a prompt.

        Args:
            ids: token ids of the prompt. Their number plus `sampling.max_new_tokens` is at most `context`.
            sampling: sampling settings and end conditions.
            on_piece: called with each piece, in the engine's thread. Must not raise.
            wanted: what the answer is wanted for, besides its text.

        Raises:
            TokenError: the model's embedding has no row for a token.
            QueueFullError: the queue is full.
            ClosedError: the engine is closed.
        """
        require_known(ids, self.vocabulary, self.tokenizer)
        sampling = replace(sampling, stop=(*sampling.stop, *self._stop))
        with self._changed:
            if not self.is_open:
                raise ClosedError("the server is shutting down")
            if len(self._waiting) >= self.queue:
                raise QueueFullError(f"{self.queue} requests are already waiting")
            sequence = Sequence(ids, sampling, on_piece, self.tokenizer, self.ends, self.seconds, wanted)
            self._waiting.append(sequence)
            self._changed.notify()
        return sequence

    def read(self, reading: "Reading") -> None:
        """Queue a text whose hidden states are wanted. The engine reads up to `CHUNK` of its tokens per step.

        Raises:
            TokenError: the model's embedding has no row for a token.
            QueueFullError: the queue is full.
            ClosedError: the engine is closed.
        """
        require_known(reading.ids, self.vocabulary, self.tokenizer)
        with self._changed:
            if not self.is_open:
                raise ClosedError("the server is shutting down")
            if len(self._readings) >= max(self.queue, 1):
                raise QueueFullError(f"{self.queue} requests are already waiting")
            self._readings.append(reading)
            self._changed.notify()

    def cancel(self, sequence: Sequence) -> None:
        """Cancel a sequence. It releases its slot and emits no more pieces, unless it is just ending."""
        with self._changed:
            sequence.cancelled = True
            if sequence in self._waiting:
                self._waiting.remove(sequence)

    def counts(self) -> dict[str, int]:
        """Return the numbers of active and waiting sequences and of kept caches."""
        return {"active": len(self._active), "waiting": len(self._waiting), "kept": len(self._kept)}

    def cached_tokens(self) -> int:
        """Return the number of tokens whose keys and values are in memory."""
        return sum(sequence.read for sequence in [*self._active]) + sum(len(prefix.ids) for prefix in [*self._kept])

    @property
    def is_open(self) -> bool:
        """Whether the engine accepts requests."""
        return self._closing == math.inf

    def close(self, patience: float = 0.0) -> None:
        """Accept no more requests, let answers run for up to `patience` seconds, then end them and the thread.

        Idempotent.
        """
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
                    self.on_step()
                    if self._readings:
                        self._read()
        finally:  # no client is left waiting, for any cause
            self._end()

    def _end(self) -> None:
        with self._changed:
            self._closing = min(self._closing, time.monotonic())
            left = [*self._active, *self._waiting]
            readings = [*self._readings]
            self._active, self._kept = [], deque()
            self._waiting.clear()
            self._readings.clear()
        for reading in readings:
            reading.fail(ClosedError("the server is shutting down"))
        for sequence in left:
            sequence.cache = None
            sequence.finish("error", error="the server is shutting down")
        self.on_step()

    def _admit(self) -> bool:
        """Give free slots to the sequences that have waited longest. Block while there is none.

        Returns:
            Whether the engine continues.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self.is_open or self._waiting or self._active or self._readings)
            if not self.is_open:
                return bool(self._active) and time.monotonic() < self._closing
            free = self.slots - len(self._active)
            admitted = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        self._active += admitted
        for sequence in admitted:
            with self._answered(sequence):
                self._begin(sequence)
        while self._kept and len(self._kept) + len(self._active) > self.slots:
            self._kept.popleft()
        return True

    def _begin(self, sequence: Sequence) -> None:
        """Give a sequence a cache, or another sequence that reads the same prompt."""
        sequence.leader = next((other for other in self._active if sequence.can_follow(other)), None)
        if sequence.leader is None:
            sequence.begin(self._cache(sequence))

    def _cache(self, sequence: Sequence) -> Any:
        """Return a cache for a sequence: one with a common prefix if it saves enough, or a new one."""
        if sequence.wanted.scores_prompt or self.deterministic:  # the logits of cached tokens are not kept
            return new_cache(self.model)
        adapter = sequence.wanted.adapter
        running = [self._prefix(other) for other in self._active if other.cache is not None and other is not sequence]
        known = [*self._kept, *(prefix for prefix in running if prefix.is_useful)]
        best = max(known, key=lambda prefix: prefix.shared(sequence.ids, adapter), default=None)
        if best is None or best.shared(sequence.ids, adapter) < WORTH:
            return new_cache(self.model)
        if best in self._kept:
            self._kept.remove(best)
        else:
            best.cache = forked(best.cache)
        return best.continued(sequence.ids)

    def _prefix(self, sequence: Sequence) -> Prefix:
        """Return the keys and values of a sequence."""
        read = sequence.ids[: sequence.read]
        return Prefix(read, sequence.cache, self._stepper.limit, sequence.wanted.adapter)

    def _leave(self) -> None:
        """Release the slots of cancelled and timed-out sequences. Their followers read the prompt themselves."""
        for sequence in [sequence for sequence in self._active if sequence.cancelled or sequence.is_late]:
            if sequence.cancelled:
                self._release(sequence)
            elif len(sequence.ids) == sequence.prompt:
                self._release(sequence)
                sequence.finish("error", error="the server was too busy to answer in time")
            else:
                with self._answered(sequence):
                    sequence.finish("length")
                    self._release(sequence)
        for sequence in [*self._active]:
            if sequence.leader is not None and sequence.leader not in self._active:
                with self._answered(sequence):
                    self._begin(sequence)

    def _parts(self) -> list[tuple[Sequence, Part]]:
        """Return the parts of the next step: one token of each sequence, and up to a chunk of prompt tokens."""
        parts, room, pauses = [], CHUNK, self._pauses()
        for sequence in self._active:
            if sequence.leader is not None or (pauses and sequence.generated):
                continue
            if self._stepper.begins_anew(sequence.read, len(sequence.ids)):
                sequence.begin(new_cache(self.model))
            left = len(sequence.ids) - sequence.read
            is_prompt, chunk = left > 1, SCORED if sequence.is_scored else CHUNK
            if is_prompt and room < (min(left, chunk) if self.deterministic else 1):
                continue
            is_whole = is_prompt and self._stepper.reads_whole(len(sequence.ids))
            most = min(room, chunk)
            part = sequence.part(None if is_whole else most if is_prompt else 1)
            room -= len(part.ids) if is_prompt else 0
            parts.append((sequence, part))
        return parts

    def _pauses(self) -> bool:
        """Return whether answers wait for this step, because a burst of prompts does not fit into it."""
        new = [sequence for sequence in self._active if sequence.leader is None and not sequence.generated]
        is_burst = len(new) > 1 and CHUNK < sum(len(sequence.ids) - sequence.read for sequence in new) <= BURST
        self._paused = self._paused + 1 if is_burst and self._paused < BURST // CHUNK - 1 else 0
        return self._paused > 0

    def _step(self) -> None:
        """Run a step and give the sequences its results.

        While all sequences write and the device can choose their tokens, the next step begins before the results of the
        last one are read. If a sequence ends with them, its part of the next step is not used.
        """
        flown, self._flight = self._flight, None
        if flown is not None and not any(sequence in self._active for sequence, _ in flown[0]):
            flown = None
        parts = self._parts() if flown is None else flown[0]
        try:
            if flown is None:
                outcomes = self._stepper.forward([part for _, part in parts])
            else:
                self._flight = self._following(*flown)
                outcomes = flown[1].outcomes([sequence in self._active for sequence, _ in parts])
        except Exception as error:
            self._flight = None
            for sequence, _ in parts:
                self._fail(sequence, error)
            if failure := lost(error):
                raise failure from error
            return
        self._give(parts, outcomes)
        if self._flight is None and self._is_steady():
            begun = [(sequence, sequence.part(1)) for sequence in self._active]
            flight = self._stepper.begin([part for _, part in begun])
            self._flight = None if flight is None else (begun, flight)

    def _following(self, parts: list[tuple[Sequence, Part]], flight: Flight) -> _Flown | None:
        """Begin the step after one that still runs, if it has the same sequences."""
        sequences = [sequence for sequence, _ in parts]
        if not self._is_steady() or sequences != self._active:
            return None
        following = self._stepper.follow(flight)
        return None if following is None else ([*zip(sequences, following.parts, strict=True)], following)

    def _is_steady(self) -> bool:
        """Return whether the next step has one token of each sequence by the device, whatever the last one gave."""
        if not self._active or self._readings or (self._waiting and len(self._active) < self.slots):
            return False
        return all(
            sequence.leader is None
            and sequence.generated > 0
            and sequence.is_left_to_device
            and sequence.wanted.adapter is None
            for sequence in self._active
        )

    def _give(self, parts: list[tuple[Sequence, Part]], outcomes: list[Outcome]) -> None:
        """Give sequences the outcomes of their parts; those that have ended meanwhile need none."""
        for (sequence, part), outcome in zip(parts, outcomes, strict=True):
            if sequence not in self._active:
                continue
            followers = [] if part.end < sequence.prompt or isinstance(outcome, Exception) else self._forked(sequence)
            for each in (sequence, *followers):
                self._take(each, part, outcome)

    def _forked(self, sequence: Sequence) -> list[Sequence]:
        """Return the followers of a sequence whose prompt has been read, with copies of its cache."""
        followers = [other for other in self._active if other.leader is sequence]
        for follower in followers:
            with self._answered(follower):
                follower.follow(forked(sequence.cache))
        return [follower for follower in followers if follower.leader is None]

    def _take(self, sequence: Sequence, part: Part, outcome: Outcome) -> None:
        """Give a sequence the outcome of a part."""
        with self._answered(sequence):
            if isinstance(outcome, Exception):
                raise outcome
            if sequence.take(part, outcome):
                prefix = self._prefix(sequence)
                self._release(sequence)
                self._keep(prefix)

    def _release(self, sequence: Sequence) -> None:
        """Take slot, keys and values from a sequence, which its client may hold for longer."""
        self._active.remove(sequence)
        sequence.cache = None

    def _read(self) -> None:
        """Read the next tokens of the text that has waited longest."""
        reading = self._readings[0]
        try:
            is_done = reading.cancelled or self._stepper.read(reading, CHUNK)
        except Exception as error:
            is_done = True
            reading.fail(error)
            if failure := lost(error):
                raise failure from error
        if is_done:
            reading.cache = None
            with self._changed:
                self._readings.popleft()

    def _relieve(self) -> bool:
        """Free the caches kept for later prompts; return whether there were any."""
        kept = bool(self._kept)
        self._kept.clear()
        if kept and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return kept

    @contextmanager
    def _answered(self, sequence: Sequence) -> Iterator[None]:
        """End the sequence with an error if the block raises."""
        try:
            yield
        except Exception as error:
            self._fail(sequence, error)

    def _located(self, sequence: Sequence, error: NonFiniteError) -> Exception:
        """Return the error of a sequence with non-finite logits, naming the layer if it can be found."""
        try:
            self.adapters.activate(sequence.wanted.adapter)
            return non_finite(self.model, {"input_ids": torch.tensor([sequence.ids[: sequence.read]])})
        except Exception:  # for example, no memory to run it again
            return error

    def _keep(self, prefix: Prefix) -> None:
        if prefix.is_useful and not self.deterministic:
            self._kept.append(prefix)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        if isinstance(error, NonFiniteError):
            error = self._located(sequence, error)
        foreseen = isinstance(error, MoepackError)
        if foreseen:
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        if sequence in self._active:  # it has not ended yet
            self._release(sequence)
            sequence.finish("error", error=str(error) if foreseen else f"the model failed: {type(error).__name__}")

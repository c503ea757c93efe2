"""Recorded passes over tokens of several sequences, each with a cache of its own.

A pass is recorded once for a number of rows, not for a cache: the kernels read from tensors which sequence a row
belongs to, its place, and where the sequence keeps its keys and values. So prompts of any length, caches that come and
go, and sequences that join and leave a batch need no new recording. There are two kinds:

- steps: each row is the next token of a sequence; sizes are `STEPS`;
- prompts: rows lie in tiles of one sequence; sizes are `ROWS`. Longer prompts take several passes.

Keys and values may be in 8 bits (`moepack.decoding.narrow`); such passes are recorded separately. Unused rows have no
place: nothing is written for them, and their results are not read. A pass may end with the head; it then chooses the
likeliest tokens on the device, or draws them, and the next step can begin with them before the host knows them.

Layers may be on several GPUs. A pass then consists of a graph for each stretch of layers on one GPU, with copies of the
activations between them.

Invariants:
- Everything that changes between passes is copied to each device in one piece before each.
- Results are overwritten by the next pass of the same size. Passes run one after the other on the current stream.
- Only models whose layers `moepack.decoding.layers` knows entirely have passes. Anything else raises `Unknown`, and
  nothing has changed.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from moepack.backends.gpu.recording import Unwritten, crossing, record
from moepack.backends.gpu.rooms import Rooms
from moepack.decoding.drawing import GREEDY, Draw
from moepack.decoding.held import Held, Passing, Shape, Span, held
from moepack.decoding.layers import Replacements, on
from moepack.decoding.signature import cache_name
from moepack.decoding.translation import Guard, Unknown, require

__all__ = ["MOST_PROMPTS", "ROWS", "STEPS", "Passes", "Ready"]

STEPS = (1, 2, 4, 8, 16, 32, 64)
ROWS = (64, 128, 256, 512, 1024, 2048)
MOST_PROMPTS = 16
"""The most sequences of a prompt's pass."""

_ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary positions whose frequencies do not depend on the length of a sequence."""


class Ready:
    """The results of a pass with the head, which may still run.

    Attributes:
        logits: [S, vocabulary], in the order of the spans; valid until the next pass.
    """

    def __init__(self, logits: Tensor, tokens: Tensor) -> None:
        self.logits, self._count = logits, len(tokens)
        self._tokens = torch.empty_like(tokens, device="cpu", pin_memory=tokens.is_cuda)
        self._tokens.copy_(tokens, non_blocking=True)
        self._event = _event(tokens.device)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(tokens.device))

    def tokens(self) -> list[int]:
        """Wait for the token of each span; -1 if its logits are not finite."""
        if self._event is not None:
            self._event.synchronize()
        return self._tokens.tolist()


def _event(device: torch.device) -> Any:
    """A new event of a GPU; None for the CPU."""
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class Passes:
    """The passes of a decoder.

    Attributes:
        shape: of its keys and values.
        tile: rows of a tile of prompts.
        works: False after a pass that could not be recorded.

    Args:
        model: the decoder without its head.
        forward: the forward of its class.
        replacements: of its modules.
        recorder: records a pass.
        head: computes logits [S, V] from hidden states [S, H]; None for passes without it.

    Raises:
        Unknown: the model has no passes.
    """

    def __init__(
        self,
        model: Any,
        forward: Callable[..., Any],
        replacements: Replacements,
        head: Callable[[Tensor], Tensor] | None = None,
        recorder: Any = record,
    ) -> None:
        self._guard = Guard.of(model)
        require(self._guard.holds(), "models with hooks")
        config, shape = model.config, replacements.held_shape
        require(shape is not None, "layers without passes")
        assert shape is not None
        require(getattr(model.rotary_emb, "rope_type", "default") in _ROTARY_TYPES, "rotary positions by length")
        require(config._attn_implementation in ("eager", "sdpa"), "other attention implementations")
        self.shape, self.tile = shape
        self._first = self.shape.devices[0]
        self._last = _device(head, self.shape.devices[-1])
        require(_device(model.embed_tokens, self._first) == self._first, "embeddings apart from the first layer")
        require(self._last.type == self._first.type, "a head on another kind of device")
        self.works = True
        self._model, self._forward, self._replacements, self._head = model, forward, replacements, head
        self._recorder = recorder
        if self._first.type == "cuda" and recorder is record:
            self._recorder = partial(record, tidy=False, pool=torch.cuda.graph_pool_handle())
        self._made: dict[_Kind, _Pass] = {}
        self._known: WeakKeyDictionary[Any, Held] = WeakKeyDictionary()
        self._chosen = torch.zeros(STEPS[-1], dtype=torch.int64, device=self._first)

    def holds(self) -> bool:
        """Whether the model is unchanged."""
        return self._guard.holds()

    def prepare(self, sequences: int, tokens: int, narrow: bool) -> None:
        """Record the passes for steps of sequences and for prompts of tokens, up to a number, so that none waits later.

        Raises:
            Unknown: a pass cannot be recorded.
        """
        steps, rows = STEPS[: bisect_left(STEPS, sequences) + 1], ROWS[: bisect_left(ROWS, tokens) + 1]
        wanted = [_Kind(size, False, narrow, draws) for size in steps for draws in (False, True)]
        wanted += [_Kind(size, True, narrow, False) for size in rows]
        with torch.inference_mode():
            for kind in wanted:
                if kind not in self._made:
                    self._recorded(kind)

    def held(self, cache: Any, batch: int, more: int) -> Held:
        """Return a cache's keys and values with room for more tokens; see `moepack.decoding.held.held`."""
        found = held(cache, self._known.get(cache), self.shape, batch, more)
        self._known[cache] = found
        return found

    def fits(self, cache: Any, more: int) -> bool:
        """Whether more tokens fit into a cache's buffers as they are."""
        known = self._known.get(cache)
        fits = known is not None and cache.get_seq_length() + more <= known.capacity
        return fits and known is not None and known.is_of(cache.layers)

    def rows(self, tokens: int) -> int:
        """Rows of a prompt's pass that a number of tokens takes."""
        return -(-tokens // self.tile) * self.tile

    def states(self, spans: Sequence[Span], is_prompt: bool, ids: Tensor | None = None) -> Tensor:
        """Read tokens; return hidden states [rows, H], each span's rows behind those of the spans before.

        Args:
            spans: prompts with together at most `ROWS[-1]` rows (`rows`) and `MOST_PROMPTS` sequences, or single tokens
                of at most `STEPS[-1]` sequences. Their caches get the tokens; the caller counts them (`Held.show`).
            is_prompt: whether these are prompts.
            ids: [rows], the tokens on the device; None if the spans have them.
        """
        states: Tensor = self._run(spans, is_prompt, ids).output
        return states

    def ready(self, spans: Sequence[Span], is_prompt: bool, draws: Sequence[Draw] | None = None) -> Ready:
        """Read tokens as `states` does; return the logits behind each span.

        Args:
            spans, is_prompt: as in `states`.
            draws: how the next token of each span is drawn; None for the likeliest.
        """
        made = self._run(spans, is_prompt, None, None if is_prompt else draws)
        logits, tokens = made.output[: len(spans)], made.tokens[: len(spans)]
        if is_prompt and draws is not None:  # one launch, for which no recording of its own is worth its memory
            with torch.inference_mode(), on(self._last):
                given = torch.tensor(draws, dtype=torch.float64).T.contiguous()
                tokens = self._replacements.draw(logits, given.to(self._last))
        return Ready(logits, tokens)

    def _run(
        self, spans: Sequence[Span], is_prompt: bool, ids: Tensor | None, draws: Sequence[Draw] | None = None
    ) -> "_Pass":
        rows = sum(self.rows(span.count) for span in spans) if is_prompt else len(spans)
        size = next((size for size in (ROWS if is_prompt else STEPS) if rows <= size), None)
        require(size is not None and len(spans) <= (MOST_PROMPTS if is_prompt else STEPS[-1]), "passes of this size")
        assert size is not None
        with torch.inference_mode():
            narrow = spans[0].held.narrow
            require(all(span.held.narrow == narrow for span in spans), "caches of two forms")
            kind = _Kind(size, is_prompt, narrow, draws is not None)
            made = self._made.get(kind) or self._recorded(kind)
            made.put(spans, self.tile, ids, draws or ())
            assert made.replay is not None
            made.replay()
            return made

    def _recorded(self, kind: "_Kind") -> "_Pass":
        """Record a pass, without tokens."""
        made = _Pass(kind, self.shape, self._last)
        made.put([], self.tile, None, ())
        try:
            self._record(made)
        except torch.OutOfMemoryError as error:
            raise Unknown("passes of this size, with this memory") from error
        except (RuntimeError, Unwritten) as error:
            self.works = False
            raise Unknown(f"this model ({str(error).partition(chr(10))[0]})") from error
        self._made[kind] = made
        return made

    def _record(self, made: "_Pass") -> None:
        """Record a pass, which has its inputs."""
        rooms = []
        for layer, (device, seen) in enumerate(zip(self.shape.devices, self.shape.windows, strict=True)):
            given = made.given[device]
            keys, values = given.addresses[:, layer]
            rooms.append(Rooms(keys, values, *given.common, made.kind.narrow, seen))
        cache = Passing(rooms, made.kind.is_prompt)
        first, last = made.given[self._first], made.given[self._last]
        mask = torch.zeros(1, 1, 1, 1, dtype=self.shape.dtype, device=self._first)
        named = {str(cache_name(type(self._model).forward)): cache}

        def run() -> Tensor:
            ids = first.ids
            if not made.kind.is_prompt:
                ids = torch.where(ids < 0, self._chosen[(-1 - ids).clamp(min=0)], ids)
            positions = first.place.clamp(min=0)[None]
            output = self._forward(
                input_ids=ids[None], attention_mask=mask, position_ids=positions, use_cache=True, **named
            )
            states: Tensor = output.last_hidden_state[0]
            if self._head is None:
                return states
            (states,) = crossing([states], self._last)
            with on(self._last):
                logits = self._head(states[last.kept])
            kept: Tensor = made.output
            kept.copy_(logits)
            if made.kind.draws:
                made.tokens.copy_(self._replacements.draw(logits, last.draws))
            else:
                made.tokens.copy_(torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), -1))
            if not made.kind.is_prompt:
                (tokens,) = crossing([made.tokens], self._first)
                self._chosen[: made.kind.size].copy_(tokens.clamp(min=0))
            return kept

        with self._replacements.active(), torch.inference_mode():
            chosen = self._chosen.clone()
            if self._head is not None:  # memory of its own, because recordings share the rest
                states = torch.zeros(len(last.kept), self._model.config.hidden_size, dtype=self.shape.dtype)
                with on(self._last):
                    made.output = torch.empty_like(self._head(states.to(self._last)))
            run()  # loads the kernels
            self._chosen.copy_(chosen)
            made.replay, output = self._recorder(run, self._first)
        made.output = output


def _device(part: Any, otherwise: torch.device) -> torch.device:
    """The device of a module's tensors."""
    tensors = (*part.parameters(), *part.buffers()) if isinstance(part, nn.Module) else ()
    return next((tensor.device for tensor in tensors), otherwise)


class _Kind(NamedTuple):
    """What a pass was recorded for.

    Attributes:
        size: the number of rows.
        is_prompt: whether rows lie in tiles of one sequence.
        narrow: whether keys and values are in 8 bits.
        draws: whether tokens are drawn.
    """

    size: int
    is_prompt: bool
    narrow: bool
    draws: bool


class _Pass:
    """The inputs and results of a pass.

    Attributes:
        kind: what it is for.
        given: the inputs, on each device.
        tokens: [S], the chosen ones.
        output: [size, H], or [S, V] with the head.
        replay: runs it.

    Args:
        kind: what it is for.
        shape: of the model's keys and values.
        last: the device of the head.
    """

    def __init__(self, kind: _Kind, shape: Shape, last: torch.device) -> None:
        self.kind, layers, size = kind, len(shape.windows), kind.size
        sequences = min(MOST_PROMPTS, size) if kind.is_prompt else size
        parts = {"ids": size, "place": size, "sequence": size, "kept": sequences, "capacity": sequences}
        parts |= {"addresses": 2 * layers * sequences, "draws": len(GREEDY) * sequences if kind.draws else 0}
        ends = np.cumsum([*parts.values()])
        self._places = {name: slice(end - parts[name], end) for name, end in zip(parts, ends.tolist(), strict=True)}
        self.given = {
            device: _Given(torch.zeros(int(ends[-1]), dtype=torch.int64, device=device), self._places, layers)
            for device in dict.fromkeys((*shape.devices, last))
        }
        cuda = last.type == "cuda"
        # Two, because the copy of the first may still be under way when the second is filled.
        self._staged = [torch.zeros(int(ends[-1]), dtype=torch.int64, pin_memory=cuda) for _ in range(2)]
        self._copied = [{device: _event(device) for device in self.given} for _ in range(2)]
        self.tokens = torch.zeros(sequences, dtype=torch.int64, device=last)
        self.output: Any = None
        self.replay: Callable[[], None] | None = None
        self._turn = 0

    def put(self, spans: Sequence[Span], tile: int, ids: Tensor | None, draws: Sequence[Draw]) -> None:
        """Copy the inputs to the device; arguments as in `Passes.ready`."""
        self._turn ^= 1
        staged, copied = self._staged[self._turn].numpy(), self._copied[self._turn]
        for event in filter(None, copied.values()):
            event.synchronize()
        part = {name: staged[place] for name, place in self._places.items()}
        addresses = part["addresses"].reshape(2, -1, len(part["kept"]))
        part["ids"][:], part["place"][:], part["sequence"][:], row = 0, -1, 0, 0
        if self.kind.draws:
            rows = [*draws, *[GREEDY] * (len(part["kept"]) - len(draws))]
            part["draws"].view(np.float64).reshape(len(GREEDY), -1)[:] = np.transpose(rows)
        for number, span in enumerate(spans):
            if span.ids:
                part["ids"][row : row + span.count] = span.ids
            part["place"][row : row + span.count] = np.arange(span.place, span.place + span.count)
            taken = -(-span.count // tile) * tile if self.kind.is_prompt else 1
            part["sequence"][row : row + taken] = number
            part["kept"][number] = row + span.count - 1
            part["capacity"][number] = span.held.capacity
            addresses[:, :, number] = span.held.addresses[span.row]
            row += taken
        for device, given in self.given.items():
            given.whole.copy_(self._staged[self._turn], non_blocking=True)
            event = copied[device]
            if event is not None:
                event.record(torch.cuda.current_stream(device))
        if ids is not None:
            next(iter(self.given.values())).ids[: len(ids)].copy_(ids)


class _Given:
    """The inputs of a pass on a device.

    Attributes:
        whole: all of them, int64.
        ids, place: [size].
        common: capacity [S], sequence and place of the rows.
        addresses: [2, layers, S], of keys and values.
        kept: [S], the rows whose logits are wanted.
        draws: [5, S] float64, how tokens are drawn.
    """

    def __init__(self, whole: Tensor, places: Mapping[str, slice], layers: int) -> None:
        part = {name: whole[place] for name, place in places.items()}
        self.whole, self.ids, self.place, self.kept = whole, part["ids"], part["place"], part["kept"]
        self.common = part["capacity"], part["sequence"], part["place"]
        self.addresses = part["addresses"].view(2, layers, -1)
        self.draws = part["draws"].view(torch.float64).view(len(GREEDY), -1)

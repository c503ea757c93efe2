"""Recording the kernels of a function in CUDA graphs, with calls between them that the host takes part in.

What only launches kernels is recorded once and replayed. A call that asks what a router chose waits for the device,
which no graph can do: such a call is an *interlude*. It ends the graph that is being recorded, runs anew at each replay
from the tensors that the graph before it has written, and the graph behind it reads what it gave.

Invariants:
- A function is recorded and replayed under the device that it launches on, whichever device is the current one. A
  capture on another device's stream would hold no kernel, and its replay would do nothing.
- The first replay checks that the result was written. A recording without kernels is an error.
- Graphs and interludes run in the order in which they were recorded, on one stream, so they share one pool of memory.
- An interlude does not run while it is recorded: what it gives has a known shape and is not read then.
"""

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from threading import Lock, local
from typing import Any

import torch
from torch import Tensor

from moepack.memory import without_collector

__all__ = ["Unwritten", "interlude", "pause", "record"]

_current = local()


class Unwritten(RuntimeError):
    """A replay that did not write its result."""


def interlude(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """Call a function that waits for the device; while this thread records, let replays call it.

    Args:
        function: takes the tensors; gives float32 of the shape of `x`.
        x, others: its arguments.
    """
    recording: _Recording | None = getattr(_current, "recording", None)
    return function(x, *others) if recording is None else recording.interlude(function, x, *others)


def pause(function: Callable[[], None]) -> None:
    """Call a function that cannot be recorded; while this thread records, let replays call it."""
    recording: _Recording | None = getattr(_current, "recording", None)
    if recording is None:
        function()
    else:
        recording.pause(function)


def record(
    function: Callable[[], Tensor], device: torch.device, *, tidy: bool = True, pool: Any = None
) -> tuple[Callable[[], None], Tensor]:
    """Record the kernels of a function; they run when the result is called, not before.

    Args:
        function: launches kernels on the device.
        device: a GPU, with its index.
        tidy: give unused memory back before, as a recording keeps what it uses. It takes a third of a second.
        pool: memory that it shares with recordings that never run at the same time
            (`torch.cuda.graph_pool_handle`); None takes a pool of its own.

    Returns:
        A function that runs the kernels, and the result, which each run writes anew. The first run raises
        `Unwritten` if nothing wrote the result.

    Raises:
        RuntimeError: the function does outside of interludes what cannot be recorded.
    """
    recording = _Recording(device, pool or torch.cuda.graph_pool_handle())
    if tidy:
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.empty_cache()
    output = recording.of(function)
    return _Checked(recording, output), output


_UNWRITTEN = -(2.0**115)
"""What marks a result before the first run. Exact in float32 and bfloat16, and no value of a model."""


class _Checked:
    """Runs a recording; the first run checks that it writes its result.

    Args:
        recording: the kernels.
        output: what they write; its contents are lost.
    """

    def __init__(self, recording: "_Recording", output: Tensor) -> None:
        self._recording, self._output = recording, output
        self._mark = max(_UNWRITTEN, torch.finfo(output.dtype).min)
        self._is_checked = False

    def __call__(self) -> None:
        if self._is_checked:
            self._recording.replay()
            return
        self._output.fill_(self._mark)
        self._recording.replay()
        if bool((self._output == self._mark).all()):
            raise Unwritten("nothing wrote the result of a recorded function: its kernels ran on another stream")
        self._is_checked = True


_one_at_a_time = Lock()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which everything is recorded.

    torch gives the same streams out again and again, and what another thread launches on one that records would be
    recorded, too. Nobody else asks for streams of this priority.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class _Recording:
    """Graphs and interludes in turn.

    Args:
        device: where its kernels run.
        pool: the memory of the graphs.
    """

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device = device
        self._steps: list[Callable[[], Any]] = []
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph

    def of(self, function: Callable[[], Tensor]) -> Tensor:
        """Record a function; its result."""
        # Garbage may hold memory that the driver does not free during a capture.
        with _one_at_a_time, without_collector(), torch.cuda.stream(_stream(self._device)):
            _current.recording = self
            try:
                self._begin()
                try:
                    output = function()
                except BaseException:
                    with suppress(RuntimeError):  # it may be what has ended the capture
                        self._graph.capture_end()
                    raise
                self._end()
            finally:
                del _current.recording
        return output

    def replay(self) -> None:
        """Run everything."""
        with torch.cuda.device(self._device):
            for step in self._steps:
                step()

    def interlude(self, function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
        """Leave a call to replays; gives where its results will be."""
        self._end()
        given = torch.empty_like(x, dtype=torch.float32)
        self._steps.append(lambda: given.copy_(function(x, *others)))
        self._begin()
        return given

    def pause(self, function: Callable[[], None]) -> None:
        """Leave a call without a result to replays."""
        self._end()
        self._steps.append(function)
        self._begin()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        self._graph.capture_end()
        self._steps.append(self._graph.replay)

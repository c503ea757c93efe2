"""Records the kernels of a function in CUDA graphs, with calls between them that involve the host or another GPU.

Code that only launches kernels is recorded once and replayed. A call that depends on the router's choice waits for the
device, which a graph cannot do. Such a call is an *interlude*: it ends the current graph, runs again on each replay
with the tensors written by the preceding graph, and the following graph reads its result.

A graph has the kernels of one GPU. A *crossing* ends it, copies tensors to another GPU at each replay, and goes on with
a graph there.

Invariants:
- Kernels are recorded and replayed with their device as the current one. A capture on another device's stream would
  contain no kernels, and its replay would do nothing.
- The first replay checks that the result was written. A recording without kernels is an error.
- Graphs and interludes run in recording order, on one stream per device, so they share one memory pool. A copy between
  devices waits for both streams, and both wait for it.
- An interlude does not run during recording: its result has a known shape and is not read at that time.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from threading import Lock, local
from typing import Any

import torch
from torch import Tensor

from moepack.memory import without_collector

__all__ = ["Unwritten", "crossing", "interlude", "pause", "record"]

_current = local()


class Unwritten(RuntimeError):
    """A replay did not write its result."""


def interlude(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """Call a function that waits for the device; if this thread is recording, defer the call to replays.

    Args:
        function: takes the tensors; returns float32 in the shape of `x`.
        x, others: its arguments.
    """
    recording: _Recording | None = getattr(_current, "recording", None)
    return function(x, *others) if recording is None else recording.interlude(function, x, *others)


def crossing(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Copy tensors to a device; if this thread is recording, it records kernels of that device from now on.

    Args:
        tensors: on one device. If it is `device`, they are returned.
        device: a GPU, with its index.
    """
    if tensors[0].device == device:
        return tensors
    recording: _Recording | None = getattr(_current, "recording", None)
    return [x.to(device) for x in tensors] if recording is None else recording.crossing(tensors, device)


def pause(function: Callable[[], None]) -> None:
    """Call a function that cannot be recorded; if this thread is recording, defer the call to replays."""
    recording: _Recording | None = getattr(_current, "recording", None)
    if recording is None:
        function()
    else:
        recording.pause(function)


def record(
    function: Callable[[], Tensor], device: torch.device, *, tidy: bool = True, pool: Any = None
) -> tuple[Callable[[], None], Tensor]:
    """Record the kernels of a function; they only run when the returned function is called.

    Args:
        function: launches kernels on the device, and on others after a `crossing`.
        device: a GPU, with its index.
        tidy: free unused memory first, because a recording keeps the memory that it uses. Takes a third of a second.
        pool: a memory pool shared with recordings that never run concurrently (`torch.cuda.graph_pool_handle`); None
            creates a new pool.

    Returns:
        A function that runs the kernels, and the result tensor, which each run overwrites. The first run raises
        `Unwritten` if nothing wrote the result.

    Raises:
        RuntimeError: the function does something outside of interludes that cannot be recorded.
    """
    recording = _Recording(device, pool or torch.cuda.graph_pool_handle())
    if tidy:
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.empty_cache()
    output = recording.of(function)
    return _Checked(recording, output), output


_UNWRITTEN = -(2.0**115)
"""Marks the result before the first run. Exact in float32 and bfloat16, and never a model's output."""


class _Checked:
    """Runs a recording; the first run checks that it writes its result.

    Args:
        recording: the kernels.
        output: the tensor that they write; its contents are lost.
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
    """The stream for all recordings on a device.

    torch reuses its pooled streams, so work that another thread launches on a recording stream would be recorded, too.
    No other code requests streams of this priority.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class _Recording:
    """A sequence of graphs and interludes.

    Args:
        device: of its first kernels.
        pool: the memory pool of the graphs.
    """

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device = device  # of the next kernels
        self._streams = ExitStack()
        self._steps: list[tuple[torch.device, Callable[[], Any]]] = []
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph

    def of(self, function: Callable[[], Tensor]) -> Tensor:
        """Record a function and return its result."""
        # Garbage may own memory that the driver cannot free during a capture.
        with _one_at_a_time, without_collector(), self._streams:
            self._streams.enter_context(torch.cuda.stream(_stream(self._device)))
            _current.recording = self
            try:
                self._begin()
                try:
                    output = function()
                except BaseException:
                    with suppress(RuntimeError):  # the error may have ended the capture already
                        self._graph.capture_end()
                    raise
                self._end()
            finally:
                del _current.recording
        return output

    def replay(self) -> None:
        """Run all graphs and interludes in order."""
        for device, step in self._steps:
            with torch.cuda.device(device):
                step()

    def interlude(self, function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
        """Defer a call to replays; return the tensor for its results."""
        self._end()
        given = torch.empty_like(x, dtype=torch.float32)
        self._add(lambda: given.copy_(function(x, *others)))
        self._begin()
        return given

    def crossing(self, tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
        """Copy tensors to another device at each replay; return their places there, and record kernels there."""
        self._end()
        given = [torch.empty_like(x, device=device) for x in tensors]

        def copy() -> None:
            for place, x in zip(given, tensors, strict=True):
                place.copy_(x, non_blocking=True)

        self._add(copy)
        self._device = device
        self._streams.enter_context(torch.cuda.stream(_stream(device)))
        self._begin()
        return given

    def pause(self, function: Callable[[], None]) -> None:
        """Defer a call without a result to replays."""
        self._end()
        self._add(function)
        self._begin()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        self._graph.capture_end()
        self._add(self._graph.replay)

    def _add(self, step: Callable[[], Any]) -> None:
        self._steps.append((self._device, step))

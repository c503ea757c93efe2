"""Recordings enter the device of the recorded call. torch's streams, devices and graphs are simulated."""

from contextlib import contextmanager

import pytest
import torch

from moepack.backends.gpu import recording
from moepack.backends.gpu.recording import Unwritten, crossing, interlude, record

SECOND = torch.device("cuda", 1)


class Cuda:
    """Graphs that record a kernel only if it is launched under the capturing device, like CUDA graphs.

    Attributes:
        entered: devices that are current, the latest last.
        runs: devices under which a graph was replayed.
    """

    def __init__(self):
        self.entered = [torch.device("cuda", 0)]
        self.capturing = None
        self.runs = []

    def launch(self, device, kernel):
        """Launch a kernel on a device's current stream."""
        if self.capturing is not None and self.entered[-1] == device:
            self.capturing.append(kernel)
        else:
            kernel()

    @contextmanager
    def device(self, device):
        self.entered.append(device)
        yield
        self.entered.pop()

    def graph(self):
        return _Graph(self)


class _Graph:
    def __init__(self, cuda):
        self.cuda, self.kernels = cuda, []

    def capture_begin(self, **settings):
        self.cuda.capturing = self.kernels

    def capture_end(self):
        self.cuda.capturing = None

    def replay(self):
        self.cuda.runs.append(self.cuda.entered[-1])
        for kernel in self.kernels:
            kernel()


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda()
    recording._stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: device)
    monkeypatch.setattr(torch.cuda, "stream", made.device)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made.graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    yield made
    recording._stream.cache_clear()


def test_a_function_is_recorded_and_replayed_under_its_own_device(cuda):
    x, y = torch.zeros(3), torch.zeros(3)

    def function():
        cuda.launch(SECOND, lambda: y.copy_(2 * x))
        return y

    run, output = record(function, SECOND)
    x.fill_(3)
    assert not output.any()  # recorded, and not run
    for value in (3.0, 4.0):
        x.fill_(value)
        run()
        assert output.tolist() == [2 * value] * 3
    assert cuda.runs == [SECOND, SECOND] and cuda.entered == [torch.device("cuda", 0)]


def test_a_recording_without_kernels_is_an_error(cuda):
    y = torch.zeros(3)

    def function():
        cuda.launch(torch.device("cuda", 2), lambda: y.fill_(1))  # runs now: another device records
        return y

    run, _ = record(function, SECOND)
    for _ in range(2):
        with pytest.raises(Unwritten, match="nothing wrote"):
            run()


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -6e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_written_value_counts(cuda, value, dtype):
    y = torch.zeros(3, dtype=dtype)

    def function():
        cuda.launch(SECOND, lambda: y.fill_(value))
        return y

    run, output = record(function, SECOND, tidy=False)
    run()
    torch.testing.assert_close(output, torch.full((3,), value, dtype=dtype), equal_nan=True)


def test_interludes_run_between_graphs_of_the_same_device(cuda):
    x, y, seen = torch.ones(2), torch.zeros(2), []

    def host(given):
        seen.append(given.tolist())
        return given + 1

    def function():
        cuda.launch(SECOND, lambda: y.copy_(x))
        between = interlude(host, y)
        cuda.launch(SECOND, lambda: y.copy_(10 * between))
        return y

    run, output = record(function, SECOND)
    assert seen == []
    run()
    assert seen == [[1.0, 1.0]] and output.tolist() == [20.0, 20.0] and cuda.runs == [SECOND, SECOND]


def test_a_crossing_copies_at_each_replay_and_goes_on_with_a_graph_of_the_other_device(cuda, monkeypatch):
    first = torch.device("cuda", 0)
    x, y, z, back = torch.ones(2), torch.zeros(2), torch.zeros(2), torch.zeros(2)
    copies = []
    monkeypatch.setattr(torch, "empty_like", lambda x, device: copies.append(device) or torch.zeros(x.shape))

    def function():
        cuda.launch(first, lambda: y.copy_(2 * x))
        (there,) = crossing([y], SECOND)
        cuda.launch(SECOND, lambda: z.copy_(there + 1))
        (here,) = crossing([z], first)
        cuda.launch(first, lambda: back.copy_(10 * here))
        return z

    run, output = record(function, first)
    assert copies == [SECOND, first] and not output.any() and cuda.entered == [first]
    for value in (1.0, 3.0):
        x.fill_(value)
        run()
        assert output.tolist() == [2 * value + 1] * 2 and back.tolist() == [20 * value + 10] * 2
    assert cuda.runs == [first, SECOND, first] * 2 and cuda.entered == [first]


def test_a_crossing_outside_of_a_recording_is_a_copy():
    x = torch.ones(2)
    assert crossing([x], x.device)[0] is x
    assert crossing([x, x], torch.device("meta"))[1].device.type == "meta"

"""Expert layers in slots: recorded calls equal launched ones, with simulated kernels and recordings."""

import gc
import weakref

import pytest
import torch

from moepack.backends.gpu import slots
from moepack.backends.gpu.matrix import DeviceMatrix, Late

SLOTS, INNER, WIDTH = 5, 6, 4


class Products:
    """Kernels over weights in a matrix's tables."""

    def gated(self, gate, up, x, index, hidden):
        for row, (token, slot) in enumerate(pairs(index)):
            if slot < SLOTS:
                first, second = (matrix.tables["weights"][slot] @ x[token] for matrix in (gate, up))
                hidden[row] = torch.nn.functional.silu(first) * second

    def project(self, matrix, x, index, out):
        for row, (_, slot) in enumerate(pairs(index)):
            if slot < SLOTS:
                out[row] = matrix.tables["weights"][slot] @ x[row]


def pairs(index):
    return [(token, int(slot)) for token, row in enumerate(index) for slot in row]


@pytest.fixture
def recorded(monkeypatch):
    """Recordings that run their function again, and the counts of recordings and runs."""
    made = []

    def record(function, device, *, tidy, pool):
        assert device.type == "cpu" and not tidy and pool == "a pool"
        output, number = function(), len(made)
        made.append(0)

        def run():
            made[number] += 1
            output.copy_(function())

        return run, output

    monkeypatch.setattr(slots, "kernels_of", lambda kind: Products())
    monkeypatch.setattr(slots, "record", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool")
    return made


def layer():
    random = torch.Generator().manual_seed(0)
    shapes = (SLOTS, INNER, WIDTH), (SLOTS, INNER, WIDTH), (SLOTS, WIDTH, INNER)
    weights = [torch.randn(shape, generator=random) for shape in shapes]
    empty = torch.empty(0, dtype=torch.uint8)
    return [DeviceMatrix(empty, each.shape, "fake", "fake", {}, {}, {"weights": each}, slots=True) for each in weights]


def call(tokens, seed):
    random = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(SLOTS + 1, generator=random)[:2] for _ in range(tokens)])
    return torch.randn((tokens, WIDTH), generator=random), index, torch.rand((tokens, 2), generator=random)


def expected(matrices, x, index, weights):
    out = torch.zeros_like(x)
    gate, up, down = (matrix.tables["weights"] for matrix in matrices)
    for (token, slot), weight in zip(pairs(index), weights.ravel(), strict=True):
        if slot < SLOTS:
            inner = torch.nn.functional.silu(gate[slot] @ x[token]) * (up[slot] @ x[token])
            out[token] += weight * (down[slot] @ inner)
    return out


def test_calls_are_recorded_when_their_shape_has_run_once(recorded):
    matrices, kept = layer(), []
    for seed in range(4):
        for tokens in (1, 3, slots.RECORDED + 1):
            given = call(tokens, seed)
            kept.append((slots.experts(matrices, *given), expected(matrices, *given)))
    for found, right in kept:  # no later call has overwritten one
        torch.testing.assert_close(found, right)
    assert recorded == [3, 3] and len(slots._recorded[matrices[-1]].of_shape) == 2


def test_late_experts_are_waited_for_in_every_call(recorded):
    matrices, waited = layer(), []
    for seed in range(4):
        x, index, weights = call(2, seed)
        first = torch.zeros_like(index, dtype=torch.bool)
        first[:, 0] = True
        late = Late(index.where(first, SLOTS), index.where(~first, SLOTS), lambda seed=seed: waited.append(seed))
        found = slots.experts([waiting_for(matrices[0], late), *matrices[1:]], x, index, weights)
        torch.testing.assert_close(found, expected(matrices, x, index, weights))
    assert sorted(set(waited)) == [0, 1, 2, 3]


def waiting_for(matrix, late):
    return DeviceMatrix(matrix.data, matrix.shape, "fake", "fake", {}, {}, matrix.tables, slots=True, late=late)


def test_recordings_from_inference_mode_work_outside_of_it(recorded):
    matrices = layer()
    with torch.inference_mode():
        for seed in range(2):
            slots.experts(matrices, *call(2, seed))
    with torch.no_grad():
        given = call(2, 7)
        torch.testing.assert_close(slots.experts(matrices, *given), expected(matrices, *given))
    assert recorded == [2]


def test_a_shape_that_cannot_be_recorded_is_launched(recorded, monkeypatch):
    tried = []

    def refused(*_, **__):
        tried.append(1)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(slots, "record", refused)
    matrices = layer()
    for seed in range(5):
        given = call(2, seed)
        torch.testing.assert_close(slots.experts(matrices, *given), expected(matrices, *given))
    assert len(tried) == 1 and len(slots._recorded[matrices[-1]].of_shape) == 0


def test_recordings_go_with_their_matrices(recorded, monkeypatch):
    monkeypatch.setattr(slots, "record", lambda function, device, **_: (lambda: None, function()))
    matrices = layer()
    for seed in range(3):
        slots.experts(matrices, *call(2, seed))
    recording = weakref.ref(next(iter(slots._recorded[matrices[-1]].of_shape.values())))
    gc.disable()  # without help
    try:
        del matrices
        assert recording() is None
    finally:
        gc.enable()

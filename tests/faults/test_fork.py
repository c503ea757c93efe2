"""A forked process computes with its own threads, because it does not inherit its parent's."""

import multiprocessing

import numpy as np
import pytest
import torch

import moepack
from moepack import _core


@pytest.fixture(scope="module")
def tensor():
    weights = torch.randn(4, 96, 256, generator=torch.Generator().manual_seed(0))
    return moepack.GroupwiseTensor.quantize(weights, bits=4)


def answers(blob, x):
    packed = _core.PackedTensor(blob)
    packed.verify()
    return [packed.decode(), packed.dequantize(), packed.matmul(x)]


def in_a_child(work):
    """The result of a forked process within a minute."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(work()))
    child.start()
    try:
        return queue.get(timeout=60)
    finally:
        child.kill()
        child.join()


def test_a_child_computes_the_same_as_its_parent(tensor):
    x = np.random.default_rng(0).standard_normal((3, 256), np.float32)
    expected = answers(tensor.data, x)
    found = in_a_child(lambda: [_core.threads(), *answers(tensor.data, x)])
    assert found[0] == _core.threads()
    assert all(np.array_equal(*pair) for pair in zip(found[1:], expected, strict=True))
    again = in_a_child(lambda: in_a_child(lambda: answers(tensor.data, x)))
    assert all(np.array_equal(*pair) for pair in zip(again, expected, strict=True))


def test_a_child_keeps_the_number_of_threads_and_may_change_it(tensor):
    before = _core.threads()
    try:
        _core.set_threads(3)
        answers(tensor.data, np.zeros((1, 256), np.float32))

        def changed():
            first = _core.threads()
            _core.set_threads(2)
            return first, _core.threads()

        assert in_a_child(changed) == (3, 2)
        assert _core.threads() == 3
    finally:
        _core.set_threads(before)

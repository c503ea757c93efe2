"""Recorded decoding steps. CUDA graphs are simulated by functions that are called again."""

from contextlib import suppress

import pytest
import torch
from transformers.cache_utils import DynamicCache

import moepack
import runtime_support
from moepack.backends.gpu.recording import Unwritten
from moepack.decoding.graphs import StepGraphs
from moepack.decoding.translation import Unknown


class Tape:
    """Records functions as a CUDA graph does: by the addresses of their tensors, results included."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, function, device):
        assert device.type == "cpu"
        self.recorded += 1
        output = torch.full_like(function(), torch.nan)

        def replay():
            self.replayed += 1
            output.copy_(function())

        return replay, output


@pytest.fixture(params=["mixtral", "qwen2_moe", "deepseek_v2"])
def model(request, tmp_path):
    directory = runtime_support.write_packed(runtime_support.tiny_model(request.param), tmp_path / "packed")
    return moepack.load(directory, dtype="float32").model


def class_forward(model):
    return type(model).forward.__get__(model)


@torch.inference_mode()
def prefill(model, ids, **options):
    cache = DynamicCache(config=model.config)
    class_forward(model)(input_ids=ids, past_key_values=cache, use_cache=True, **options)
    return cache


@torch.no_grad()
def decode(model, graphs, cache, tokens, **options):
    """States of tokens one after another, by replay if possible."""
    states = []
    for token in tokens.T:
        seen = {name: value() for name, value in options.items()}
        given, state = {"input_ids": token[:, None]}, None
        if graphs:
            with suppress(Unknown):
                state = graphs.step(model, class_forward(model), given, cache, **seen)
        if state is None:
            output = class_forward(model)(**given, past_key_values=cache, use_cache=True, **seen)
            state = output.last_hidden_state
        states.append(state)
    return torch.cat(states, 1)


def ids(batch, tokens, seed=0):
    return torch.randint(3, 64, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def test_replayed_steps_compute_the_same_as_the_model(model):
    tape, tokens = Tape(), ids(1, 12, seed=1)
    expected = decode(model, None, prefill(model, ids(1, 7)), tokens)
    found = decode(model, StepGraphs(tape), prefill(model, ids(1, 7)), tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (tape.recorded, tape.replayed) == (1, 11)  # the first step of a cache runs normally


def test_padded_batches(model):
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[0, :4] = mask[2, :1] = 0
    results = []
    for graphs in (None, StepGraphs(Tape())):
        cache = prefill(model, ids(3, 7), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))

        def grown(cache=cache):
            return torch.cat([mask, mask.new_ones(3, cache.get_seq_length() + 1 - 7)], 1)

        positions = lambda grown=grown: grown().sum(1, keepdim=True) - 1  # noqa: E731
        results.append(decode(model, graphs, cache, ids(3, 6, seed=1), attention_mask=grown, position_ids=positions))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_buffers_that_grow_are_recorded_anew(model):
    tape, tokens = Tape(), ids(1, 300, seed=1)
    expected = decode(model, None, prefill(model, ids(1, 5)), tokens[:, :280])
    found = decode(model, StepGraphs(tape), prefill(model, ids(1, 5)), tokens[:, :280])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert tape.recorded == 2


def test_caches_that_take_turns_are_not_recorded(model):
    tape = Tape()
    graphs, one, two = StepGraphs(tape), prefill(model, ids(1, 5)), prefill(model, ids(1, 6, seed=2))
    for _ in range(3):
        for cache in (one, two):
            decode(model, graphs, cache, ids(1, 1, seed=3))
    assert tape.recorded == 0


def test_a_cropped_cache_sees_only_the_remaining_tokens(model):
    graphs, cache = StepGraphs(Tape()), prefill(model, ids(1, 7))
    decode(model, graphs, cache, ids(1, 5, seed=1))
    cache.crop(-3)
    again = prefill(model, torch.cat([ids(1, 7), ids(1, 5, seed=1)[:, :2]], 1))
    tokens = ids(1, 3, seed=4)
    torch.testing.assert_close(
        decode(model, graphs, cache, tokens), decode(model, None, again, tokens), rtol=1e-4, atol=1e-4
    )


def test_a_changed_model_is_recorded_anew_and_hooks_are_obeyed(model):
    tape = Tape()
    graphs, cache = StepGraphs(tape), prefill(model, ids(1, 5))
    decode(model, graphs, cache, ids(1, 3))
    model.norm.weight.data = model.norm.weight.data * 2
    decode(model, graphs, cache, ids(1, 2))
    assert tape.recorded == 2
    calls = []
    model.layers[0].register_forward_hook(lambda *given: calls.append(1))
    decode(model, graphs, cache, ids(1, 2))
    assert (tape.recorded, len(calls)) == (2, 2)


def test_unrecordable_calls_run_normally(model):
    def refuse(function, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    tokens = ids(1, 4, seed=1)
    expected = decode(model, None, prefill(model, ids(1, 7)), tokens)
    found = decode(model, StepGraphs(refuse), prefill(model, ids(1, 7)), tokens)
    torch.testing.assert_close(found, expected)


def test_recordings_are_asked_for_on_the_device_of_the_input(model):
    """A model may be on another device than the current one."""
    devices = []

    def recorder(function, device):
        devices.append(device)
        return Tape()(function, device)

    decode(model, StepGraphs(recorder), prefill(model, ids(1, 5)), ids(1, 3))
    assert devices == [next(model.parameters()).device]


def test_a_replay_that_writes_nothing_is_an_error(model):
    def recorder(function, device):
        def replay():
            raise Unwritten("nothing wrote the result")

        return replay, function()

    tokens, graphs = ids(1, 5, seed=1), StepGraphs(recorder)
    expected = decode(model, None, prefill(model, ids(1, 7)), tokens)
    cache = prefill(model, ids(1, 7))
    torch.testing.assert_close(decode(model, graphs, cache, tokens), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(Unknown, match="nothing wrote"):
        graphs.step(model, class_forward(model), {"input_ids": ids(1, 1)}, cache)

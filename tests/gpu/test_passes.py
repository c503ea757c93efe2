"""Recorded passes over several sequences. Reference operations stand in for kernels, functions for CUDA graphs."""

import ctypes

import numpy as np
import pytest
import torch
from test_attention import attention
from test_graphs import Tape, class_forward, decode, ids, prefill
from test_layers import SETTINGS, Reference, _rotated
from transformers.cache_utils import DynamicCache

import moepack
import runtime_support
from moepack.census.tiny import tiny_model
from moepack.decoding import layers, narrow
from moepack.decoding.graphs import StepGraphs
from moepack.decoding.held import Span
from moepack.decoding.passes import ROWS, Passes
from moepack.decoding.prefix import kv_bits, new_cache, set_kv_bits
from moepack.decoding.translation import Unknown
from moepack.serving.text import sampling
from moepack.serving.text.sampling import Sampler, Sampling

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "gpt_oss")
TILE = 8


class InRooms(Reference):
    """Operations on buffers that are known by their addresses."""

    def tile_rows(self, group):
        return TILE

    def attends_in_rooms(self, dtype, width):
        return True

    def prepare_heads_in_rooms(self, heads, rooms):
        q, k = heads.queries, heads.keys
        if heads.query_norm is not None:
            q, k = self.rms_norm(q, heads.query_norm, heads.epsilon), self.rms_norm(k, heads.key_norm, heads.epsilon)
        q, k = (_rotated(each, heads) for each in (q, k))
        for row, (sequence, place) in enumerate(zip(rooms.sequence.tolist(), rooms.place.tolist(), strict=True)):
            if place >= 0:
                for address, tokens in ((rooms.keys, k), (rooms.values, heads.values)):
                    written = narrow.encode(tokens[row]) if rooms.narrow else tokens[row]
                    _buffer(address, rooms, sequence, tokens)[:, place] = written
        return q

    def attend_in_rooms(self, queries, rooms, is_prompt, groups, scale, sinks):
        out = torch.zeros_like(queries)
        shape = torch.empty(groups, queries.shape[-1])
        for row, (sequence, place) in enumerate(zip(rooms.sequence.tolist(), rooms.place.tolist(), strict=True)):
            if is_prompt:
                assert sequence == rooms.sequence[row // TILE * TILE]
            if place >= 0:
                first = max(0, place + 1 - rooms.window) if rooms.window else 0
                held = (_buffer(each, rooms, sequence, shape[None])[None] for each in (rooms.keys, rooms.values))
                k, v = (each[:, :, first : place + 1] for each in held)
                k, v = (narrow.decode(each, queries.dtype) if rooms.narrow else each for each in (k, v))
                out[row] = attention(queries[row, None], k, v, torch.zeros(1, k.shape[2]), scale, sinks)[0]
        return out

    def draw(self, logits, draws):
        return torch.tensor([_drawn(*pair) for pair in zip(logits, draws.T.tolist(), strict=True)])


def _drawn(logits, draw):
    """The token that the sampler of one sequence draws."""
    temperature, top_k, top_p, min_p, uniform = draw
    if not logits.isfinite().all():
        return -1
    sampler = Sampler(Sampling(temperature, top_p, int(top_k), min_p))
    return sampling._drawn(sampler.scores(logits, []), uniform) if temperature else int(logits.argmax())


def _buffer(addresses, rooms, sequence, like):
    """[groups, capacity, width] at an address; [groups, capacity, width + 4] of int8 if it is narrow."""
    size, kind = [like.shape[1], int(rooms.capacity[sequence]), like.shape[2]], ctypes.c_float
    if rooms.narrow:
        size[2], kind = size[2] + 4, ctypes.c_int8
    pointer = ctypes.cast(int(addresses[sequence]), ctypes.POINTER(kind))
    return torch.from_numpy(np.ctypeslib.as_array(pointer, size))


class Recorded(Tape):
    """Replays with the replacements with which it records."""

    replacements = None

    def __call__(self, function, device):
        def replaced():
            with self.replacements.active():
                return function()

        return super().__call__(replaced, device)


@pytest.fixture(params=FAMILIES)
def model(request, tmp_path):
    own = SETTINGS.get(request.param)
    made = runtime_support.tiny_model(request.param) if own is None else tiny_model(request.param, own=own)
    return moepack.load(runtime_support.write_packed(made, tmp_path / "packed"), dtype="float32")


def passes_of(model, tape=None, head=None):
    tape = tape or Recorded()
    tape.replacements = layers.Replacements(model.model, InRooms())
    return Passes(model.model, class_forward(model.model), tape.replacements, head, tape)


def replace_in_rooms(monkeypatch, tape):
    """Let decoders replace modules by the reference operations."""
    own = layers.Replacements

    def replacements(module):
        tape.replacements = own(module, InRooms())
        return tape.replacements

    monkeypatch.setattr("moepack.decoding.graphs.Replacements", replacements)


def spans_of(passes, prompts, caches):
    spans = []
    for prompt, cache in zip(prompts, caches, strict=True):
        held = passes.held(cache, 1, len(prompt))
        spans.append(Span(prompt, len(prompt), cache.get_seq_length(), held))
    return spans


def read(passes, prompts, caches):
    """Hidden states of each prompt."""
    spans, rows, found = spans_of(passes, prompts, caches), 0, []
    states = passes.states(spans, True).clone()
    for span, cache in zip(spans, caches, strict=True):
        span.held.show(cache.get_seq_length() + span.count)
        found.append(states[rows : rows + span.count])
        rows += passes.rows(span.count)
    return found


@torch.inference_mode()
def test_prompts_of_several_lengths_compute_the_same_as_the_model(model):
    tape = Recorded()
    passes, prompts = passes_of(model, tape), [ids(1, n, seed=n)[0].tolist() for n in (5, 17, 1)]
    caches = [DynamicCache(config=model.config) for _ in prompts]
    longer = [ids(1, n, seed=n + 50)[0].tolist() for n in (9, 1, 30)]
    first, second = read(passes, prompts, caches), read(passes, longer, caches)
    assert tape.recorded == 1
    for prompt, more, cache, *states in zip(prompts, longer, caches, first, second, strict=True):
        own = prefill(model.model, torch.tensor([prompt + more]))
        expected = class_forward(model.model)(input_ids=torch.tensor([prompt + more])).last_hidden_state[0]
        torch.testing.assert_close(torch.cat(states), expected, rtol=1e-4, atol=1e-4)
        for layer, other in zip(cache.layers, own.layers, strict=True):
            torch.testing.assert_close(layer.keys, other.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(layer.values, other.values, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_steps_choose_the_tokens_of_the_model(model):
    head = lambda states: model.lm_head(states)  # noqa: E731
    passes, prompts = passes_of(model, head=head), [ids(1, n, seed=n)[0].tolist() for n in (4, 9, 6)]
    caches = [DynamicCache(config=model.config) for _ in prompts]
    spans = spans_of(passes, prompts, caches)
    tokens = [[token] for token in passes.ready(spans, True).tokens()]
    for span in spans:
        span.held.show(span.count)
    counts = [len(prompt) for prompt in prompts]
    for step in range(4):
        spans = [
            Span([-1 - row if step else tokens[row][-1]], 1, counts[row], passes.held(cache, 1, 2))
            for row, cache in enumerate(caches)
        ]
        found = passes.ready(spans, False).tokens()  # later steps begin with what the device has chosen
        for row, span in enumerate(spans):
            tokens[row].append(found[row])
            counts[row] += 1
            span.held.show(counts[row])
    for prompt, found in zip(prompts, tokens, strict=True):
        written = list(prompt)
        for token in found:
            assert int(model(torch.tensor([written])).logits[0, -1].argmax()) == token
            written.append(token)


@torch.inference_mode()
def test_caches_grow_and_are_cropped(model):
    passes, cache = passes_of(model), DynamicCache(config=model.config)
    prompt = ids(1, 40, seed=3)[0].tolist()
    read(passes, [prompt[:20]], [cache])
    first = passes.held(cache, 1, 1)
    assert passes.held(cache, 1, 200) is first
    grown = passes.held(cache, 1, 300)
    assert grown is not first and cache.get_seq_length() == 20
    if model.config.model_type == "gpt_oss":
        return  # transformers does not crop windows
    cache.crop(-7)
    (found,) = read(passes, [prompt[13:]], [cache])
    expected = class_forward(model.model)(input_ids=torch.tensor([prompt])).last_hidden_state[0, 13:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # A cache that transformers has extended since.
    class_forward(model.model)(input_ids=torch.tensor([prompt]), past_key_values=cache, use_cache=True)
    (found,) = read(passes, [prompt[:3]], [cache])
    expected = class_forward(model.model)(input_ids=torch.tensor([prompt * 2 + prompt[:3]])).last_hidden_state[0, -3:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_what_has_no_passes_says_so(model, tmp_path):
    passes = passes_of(model)
    cache = DynamicCache(config=model.config)
    with pytest.raises(Unknown, match="passes of this size"):
        passes.states([Span([], ROWS[-1] + 1, 0, passes.held(cache, 1, 1))], True)
    other = prefill(model.model, ids(2, 3))
    with pytest.raises(Unknown, match="unexpected contents"):
        passes.held(other, 1, 1)
    directory = runtime_support.write_packed(runtime_support.tiny_model("deepseek_v2"), tmp_path / "latent")
    latent = moepack.load(directory, dtype="float32")
    with pytest.raises(Unknown):
        passes_of(latent)


@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_prompts_of_a_decoder_run_in_passes(model, batch, monkeypatch):
    decoder, tape = model.model, Recorded()

    replace_in_rooms(monkeypatch, tape)
    monkeypatch.setattr("moepack.decoding.graphs.ROWS", (64, 4 * TILE * batch))  # longer prompts take several passes
    graphs, prompt = StepGraphs(tape), ids(batch, 4 * TILE + 5)
    found, expected = DynamicCache(config=decoder.config), prefill(decoder, prompt)
    states = graphs.read(decoder, class_forward(decoder), prompt, found, torch.ones_like(prompt))
    own_states = class_forward(decoder)(input_ids=prompt).last_hidden_state
    torch.testing.assert_close(states, own_states, rtol=1e-4, atol=1e-4)
    assert tape.replayed == 2
    more = ids(batch, 3, seed=1)  # a further turn
    states = graphs.read(decoder, class_forward(decoder), more, found, None)
    output = class_forward(decoder)(input_ids=more, past_key_values=expected, use_cache=True)
    torch.testing.assert_close(states, output.last_hidden_state, rtol=1e-4, atol=1e-4)
    assert found.get_seq_length() == prompt.shape[1] + 3
    mask = torch.ones(batch, found.get_seq_length() + 3)
    mask[0, 0] = 0
    with pytest.raises(Unknown, match="hide tokens"):
        graphs.read(decoder, class_forward(decoder), more, found, mask)
    tokens = ids(batch, 3, seed=2)
    after = [decode(decoder, each, cache, tokens) for each, cache in ((graphs, found), (None, expected))]
    torch.testing.assert_close(*after, rtol=1e-4, atol=1e-4)


@pytest.fixture(params=[False, True], ids=["plain", "narrow"])
def windowed(request, tmp_path):
    """A model with windows of nine tokens, and whether its caches are in 8 bits."""
    made = runtime_support.tiny_model("mixtral")
    made.config.sliding_window = 9
    model = moepack.load(runtime_support.write_packed(made, tmp_path / "packed"), dtype="float32")
    set_kv_bits(model, 8 if request.param else None)
    return model


@torch.inference_mode()
def test_passes_keep_windows(windowed):
    """Prompts and steps, first in one and then in the other, see what the model's own caches see."""
    tape, model = Recorded(), windowed
    passes, prompt, rest = passes_of(model, tape), ids(1, 30, seed=1), ids(1, 20, seed=2)
    cache, own = new_cache(model), new_cache(model)
    (found,) = read(passes, [prompt[0].tolist()], [cache])
    expected = class_forward(model.model)(input_ids=prompt, past_key_values=own, use_cache=True).last_hidden_state
    close = {"rtol": 1e-4, "atol": 1e-4} if kv_bits(model) is None else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found, expected[0], **close)
    for turn, token in enumerate(rest[0].tolist()):
        expected = class_forward(model.model)(input_ids=torch.tensor([[token]]), past_key_values=own, use_cache=True)
        if turn % 7 == 3:  # the model continues what passes have written, and passes what the model has
            found = class_forward(model.model)(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            found = found.last_hidden_state[0]
        else:
            span = Span([token], 1, cache.get_seq_length(), passes.held(cache, 1, 1))
            found = passes.states([span], False)[:1]
            span.held.show(span.place + 1)
        torch.testing.assert_close(found, expected.last_hidden_state[0], **close)
    for layer, other in zip(cache.layers, own.layers, strict=True):
        assert isinstance(layer, type(other)) and layer.keys.shape == other.keys.shape
        assert layer.get_seq_length() == other.get_seq_length() == 50


@torch.inference_mode()
def test_caches_in_8_bits_hold_what_the_model_s_own_do(model):
    """The caches are equal up to rounding in their inputs, and a pass of one form does not run another."""
    set_kv_bits(model, 8)
    tape = Recorded()
    passes, prompts = passes_of(model, tape), [ids(1, n, seed=n)[0].tolist() for n in (7, 12)]
    caches = [new_cache(model) for _ in prompts]
    found = read(passes, prompts, caches)
    for prompt, cache, states in zip(prompts, caches, found, strict=True):
        own = new_cache(model)
        output = class_forward(model.model)(input_ids=torch.tensor([prompt]), past_key_values=own, use_cache=True)
        torch.testing.assert_close(states, output.last_hidden_state[0], rtol=0.05, atol=0.05)
        for layer, other in zip(cache.layers, own.layers, strict=True):
            assert type(layer) in (narrow.NarrowLayer, narrow.NarrowWindow) and layer.keys.dtype is torch.int8
            one, two = (narrow.decode(each, torch.float32) for each in (layer.keys, other.keys))
            torch.testing.assert_close(one, two, rtol=0.05, atol=0.05)
    read(passes, prompts, [DynamicCache(config=model.config) for _ in prompts])
    assert tape.recorded == 2
    with pytest.raises(Unknown, match="two forms"):
        spans_of_both = spans_of(passes, prompts, [caches[0], DynamicCache(config=model.config)])
        passes.states(spans_of_both, True)


@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_steps_of_a_decoder_with_windows_or_8_bits_run_in_passes(windowed, batch, monkeypatch):
    decoder, tape = windowed.model, Recorded()

    replace_in_rooms(monkeypatch, tape)
    graphs, prompt, tokens = StepGraphs(tape), ids(batch, 20), ids(batch, 6, seed=1)
    found, expected = new_cache(windowed), new_cache(windowed)
    for cache in (found, expected):
        class_forward(decoder)(input_ids=prompt, past_key_values=cache, use_cache=True)
    for step, ids_ in enumerate(tokens.split(1, 1)):
        mask, positions = torch.ones(batch, 21 + step), torch.full((batch, 1), 20 + step)
        states = graphs.read(decoder, class_forward(decoder), ids_, found, mask, positions)
        output = class_forward(decoder)(input_ids=ids_, past_key_values=expected, use_cache=True)
        torch.testing.assert_close(states, output.last_hidden_state, rtol=0.05, atol=0.05)
    assert (tape.recorded, tape.replayed) == (1, 6)
    with pytest.raises(Unknown, match="positions"):
        graphs.read(decoder, class_forward(decoder), ids_, found, None, positions - 3)

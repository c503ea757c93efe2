"""Passes of models with layers on several devices. Marks on tensors stand in for GPUs, functions for CUDA graphs."""

import pytest
import torch
from test_graphs import class_forward, ids, prefill
from test_passes import InRooms, Recorded, read, replace_in_rooms, spans_of
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary
from transformers.cache_utils import DynamicCache

import moepack
import runtime_support
from moepack.census.tiny import tiny_model
from moepack.decoding import layers
from moepack.decoding.graphs import StepGraphs
from moepack.decoding.held import Span
from moepack.decoding.passes import Passes
from moepack.decoding.translation import Guard, Unknown

FIRST, SECOND = torch.device("cpu", 0), torch.device("cpu", 1)
MOVES = {torch.Tensor.to, torch.Tensor.copy_}


class Marks(TorchFunctionMode):
    """Lets tensors on the CPU claim to be on devices: a function of tensors on two devices raises.

    Attributes:
        moves: copies between devices.
    """

    def __init__(self):
        super().__init__()
        self.marks, self.moves = WeakIdKeyDictionary(), 0

    def put(self, module, device):
        """Put the tensors of a module on a device."""
        for tensor in (*module.parameters(), *module.buffers()):
            self.marks[tensor] = device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function == torch.Tensor.device.__get__:  # another object at each access
            return self.marks.get(args[0], torch.device("cpu"))
        flat = [*tree_flatten((args, kwargs))[0]]
        found = {self.marks[each] for each in flat if isinstance(each, torch.Tensor) and each in self.marks}
        named = [each for each in flat if isinstance(each, torch.device) and each.index is not None]
        if function in MOVES:
            self.moves += len(found) > 1 or bool(named and found and {*named} != found)
            if function is torch.Tensor.copy_:
                return function(*args, **kwargs)
        elif len(found) > 1:
            raise RuntimeError(f"{function.__name__} of tensors on {sorted(map(str, found))}")
        device = next(iter([*named, *found]), None)
        result = function(*args, **kwargs)
        if function is torch.Tensor.to and named and found and {*named} != found:
            result = result.clone()
        if device is not None and not (function is torch.Tensor.to and torch.device("cpu") in flat):
            for each in tree_flatten(result)[0]:
                if isinstance(each, torch.Tensor):
                    self.marks[each] = device
        return result


SETTINGS = {
    "qwen3_moe": {}, "gpt_oss": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2},
}  # fmt: skip


@pytest.fixture(params=SETTINGS)
def model(request, tmp_path):
    made = tiny_model(request.param, own={"num_hidden_layers": 4, **SETTINGS[request.param]})
    return moepack.load(runtime_support.write_packed(made, tmp_path / "packed"), dtype="float32")


@pytest.fixture
def marks(model):
    """The layers on two devices in turn; accelerate puts the rotary positions on any."""
    found = Marks()
    decoder = model.model
    for number, layer in enumerate(decoder.layers):
        found.put(layer, SECOND if number in (1, 3) else FIRST)
    found.put(decoder.embed_tokens, FIRST)
    for part in (decoder.norm, decoder.rotary_emb, model.lm_head):
        found.put(part, SECOND)
    return found


def passes_of(model, tape, head=None):
    tape.replacements = layers.Replacements(model.model, InRooms())
    return Passes(model.model, class_forward(model.model), tape.replacements, head, tape)


@torch.inference_mode()
def test_prompts_compute_what_one_device_does(model, marks):
    prompts = [ids(1, n, seed=n)[0].tolist() for n in (5, 17)]
    more = [ids(1, n, seed=n + 50)[0].tolist() for n in (300, 3)]  # the first no longer fits
    results = []
    for _ in range(2):
        tape = Recorded()
        caches = [DynamicCache(config=model.config) for _ in prompts]
        passes = passes_of(model, tape)
        results.append([*read(passes, prompts, caches), *read(passes, more, caches)])
        if results[1:]:
            assert marks.moves > 0
            devices = [marks.marks[layer.keys] for layer in caches[0].layers]
            assert devices == [FIRST, SECOND] * 2
            break
        marks.__enter__()
    marks.__exit__(None, None, None)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@torch.inference_mode()
def test_steps_begin_with_the_tokens_of_the_last_device(model, marks):
    prompt = ids(1, 9)[0].tolist()
    with marks:
        passes = passes_of(model, Recorded(), model.lm_head)
        cache = DynamicCache(config=model.config)
        (span,) = spans_of(passes, [prompt], [cache])
        tokens = passes.ready([span], True).tokens()
        span.held.show(span.count)
        for step in range(4):
            place = len(prompt) + step
            span = Span([-1 if step else tokens[-1]], 1, place, passes.held(cache, 1, 2))
            tokens += passes.ready([span], False).tokens()
            span.held.show(place + 1)
    written = list(prompt)
    for token in tokens:
        assert int(model(torch.tensor([written])).logits[0, -1].argmax()) == token
        written.append(token)


@torch.no_grad()
def test_a_decoder_on_several_devices_steps_in_passes(model, marks, monkeypatch):
    decoder, tape = model.model, Recorded()

    replace_in_rooms(monkeypatch, tape)
    graphs, prompt, token = StepGraphs(tape), ids(1, 8), ids(1, 1, seed=1)
    cache = prefill(decoder, prompt)
    with marks:
        if model.config.model_type != "gpt_oss":  # whose windows never step in this way
            with pytest.raises(Unknown, match="on several devices"):
                graphs.step(decoder, class_forward(decoder), {"input_ids": token}, cache)
            assert graphs.in_passes
        state = graphs.read(decoder, class_forward(decoder), token, cache, None)
    expected = class_forward(decoder)(input_ids=torch.cat([prompt, token], 1)).last_hidden_state[:, -1:]
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)
    assert tape.recorded == 1


@torch.inference_mode()
def test_hooks_that_only_place_modules_do_not_count(model):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    decoder = model.model
    for module in (*decoder.layers.modules(), decoder.norm, decoder.embed_tokens, decoder.rotary_emb, model.lm_head):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    prompt = ids(1, 9)[0].tolist()
    tape, cache = Recorded(), DynamicCache(config=model.config)
    passes = passes_of(model, tape)
    (found,) = read(passes, [prompt], [cache])
    torch.testing.assert_close(
        found, class_forward(decoder)(input_ids=torch.tensor([prompt])).last_hidden_state[0], rtol=1e-4, atol=1e-4
    )
    remove_hook_from_module(decoder.layers[0])
    assert not passes.holds()
    guard = Guard.of(decoder)
    assert guard.holds()
    add_hook_to_module(decoder.layers[0], AlignDevicesHook(execution_device="cpu", offload=True))
    assert not guard.holds() and not Guard.of(decoder).holds()

"""Decoding in the core against transformers: equal numbers if it is used, and not used if unsupported."""

import copy
import io
from typing import ClassVar

import numpy as np
import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, StaticCache

import moepack
from moepack import _core
from moepack.decoding import cache as caches
from moepack.decoding.cache import GrowingLayer
from moepack.decoding.decoder import FEW, VARIABLE, HeadForward, decoding, set_decoding
from moepack.decoding.prefix import new_cache
from moepack.decoding.signature import CallReader, cache_name, cached
from moepack.decoding.stepping import stepping, tried
from moepack.decoding.translation import Translation, Unknown
from moepack.format import PackedDirectory
from moepack.methods import PackedBytes, PacksLinears, SimpleMethod, Solution, create
from moepack.methods.qmoe.ternary import Ternary
from runtime_support import tiny_model, write_packed

KNOWN = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
PROMPT, TOKENS = 5, 24


@pytest.fixture(autouse=True)
def default_decoding():
    """Restore the default after each test."""
    yield
    set_decoding(None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A function from an architecture and a method to a packed directory."""
    made = {}

    def make(architecture, method="finequant", **settings):
        key = architecture, method, *sorted(settings.items())
        if key not in made:
            path = tmp_path_factory.mktemp("packed") / "model"
            chosen = Ternary() if method == "ternary" else create(method, **settings)
            made[key] = write_packed(tiny_model(architecture), path, chosen)
        return made[key]

    return make


@pytest.fixture
def model(directory):
    return moepack.load(directory("qwen3_moe"), dtype="float32")


def ids(tokens=PROMPT + TOKENS, seed=3):
    return torch.from_numpy(np.random.default_rng(seed).integers(3, 64, (1, tokens)))


def steps_of(model):
    return model.model.forward.steps


def run(model, mode, tokens=None, past=None, prompt=PROMPT):
    """Logits of each token after a prompt, read one by one, and the cache."""
    set_decoding(mode)
    tokens = ids() if tokens is None else tokens
    found = []
    with torch.inference_mode():
        state = model(tokens[:, :prompt], past_key_values=past, use_cache=True)
        for token in tokens[:, prompt:].split(1, dim=1):
            state = model(token, past_key_values=state.past_key_values, use_cache=True)
            found.append(state.logits[0, -1].float())
    return torch.stack(found), state.past_key_values


def assert_near(found, expected, bound=2e-5):
    """Equal up to the rounding of float32 through two layers; `bound` is of the largest value, measured 4e-6."""
    assert (found - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("architecture", KNOWN)
@pytest.mark.parametrize("settings", [{}, {"dense_bits": 8}], ids=["dense", "packed"])
def test_steps_match_transformers(directory, architecture, settings):
    model = moepack.load(directory(architecture, **settings), dtype="float32")
    expected, expected_cache = run(model, "transformers")
    assert steps_of(model) == 0
    found, cache = run(model, "native")
    assert steps_of(model) == TOKENS
    assert_near(found, expected)
    for mine, theirs in zip(cache.layers, expected_cache.layers, strict=True):
        assert mine.get_seq_length() == PROMPT + TOKENS
        assert_near(mine.keys, theirs.keys)
        assert_near(mine.values, theirs.values)


@pytest.mark.parametrize("method", ["ternary", "milo", "finequant"])
def test_every_format_takes_part(directory, method):
    settings = {"bits": 3} if method == "finequant" else {}
    model = moepack.load(directory("mixtral", method, **settings), dtype="float32")
    expected, _ = run(model, "transformers")
    found, _ = run(model, "native")
    assert steps_of(model) == TOKENS
    assert_near(found, expected)


def test_codebooks_take_part(tmp_path):
    source = tiny_model("mixtral")
    weights = write_packed(source, tmp_path / "model", _Codebooks())
    model = moepack.load(weights, dtype="float32")
    expected, _ = run(model, "transformers")
    found, _ = run(model, "native")
    assert steps_of(model) == TOKENS
    assert_near(found, expected)


@pytest.mark.parametrize("own", [False, True])
def test_coded_tensors_with_scales_of_columns_take_part(tmp_path, own):
    model = moepack.load(write_packed(tiny_model("qwen3_moe"), tmp_path / "model", _Columns(own)), dtype="float32")
    details = [record.details for record in PackedDirectory.open(tmp_path / "model").manifest.packed().values()]
    assert len(details) > 10 and all(each["column_scales"] for each in details)
    expected, _ = run(model, "transformers")
    found, _ = run(model, "native")
    assert steps_of(model) == TOKENS
    assert_near(found, expected)


class _Columns(PacksLinears, SimpleMethod):
    """Weights divided by random scales of columns and rounded to coded integers."""

    name = "test-columns"
    settings: ClassVar = {}
    dense_roles = frozenset({"embedding", "attention", "head"})

    def __init__(self, own):
        self.own = own

    def bound(self, shape, role="experts"):
        return 1 << 16 | 8 * shape[0] * (shape[1] + 64) * (shape[2] + 256)

    def solve(self, stage):
        return {name: Solution({}, details={"seed": len(name)}) for name in stage.tensors}

    def pack(self, weights, solution):
        values = torch.stack([weights.expert(expert).float() for expert in range(weights.shape[0])]).numpy()
        random = np.random.default_rng(solution.details["seed"])
        columns = random.uniform(0.25, 4, (len(values) if self.own else 1, values.shape[2])).astype(np.float32)
        step = np.abs(values).max(keepdims=True)[0] / 16
        codes = np.rint(values / (step * columns[:, None])).astype(np.int32)
        blob = _core.encode_coded(codes, step.astype(np.float32), ndim=weights.ndim, columns=columns)
        return PackedBytes("coded", blob, _core.PackedTensor(blob).details())


class _Codebooks(PacksLinears, SimpleMethod):
    """Random codebooks, multiplied exactly."""

    name = "test-codebooks"
    settings: ClassVar = {}
    dense_roles = frozenset({"attention"})

    def bound(self, shape, role="experts"):
        return 1 << 16 | 4 * shape[0] * (shape[1] + 16) * (shape[2] + 256)

    def solve(self, stage):
        return {name: Solution({}, details={"seed": len(name)}) for name in stage.tensors}

    def pack(self, weights, solution):
        random = np.random.default_rng(solution.details["seed"])
        codes = random.integers(0, 16, weights.shape, np.uint8)
        centroids = random.integers(-32639, 32640, (*weights.shape[:2], 1, 16)).astype(np.int16)
        scales = np.full(centroids.shape[:3], 2 / 32639 / weights.shape[2] ** 0.5, np.float32)
        blob = _core.encode_codebook(codes, centroids, scales, bits=4, block=1 << 16, ndim=weights.ndim)
        return PackedBytes("codebook", blob, {"bits": 4})


@pytest.mark.parametrize("architecture", KNOWN)
def test_bfloat16_loses_no_more_than_transformers_does(directory, architecture):
    """Both are compared with float32; the median ignores single tokens whose experts change by rounding."""
    path = directory(architecture)
    expected, _ = run(moepack.load(path, dtype="float32"), "transformers")
    model = moepack.load(path, dtype="bfloat16")
    errors = [(run(model, mode)[0] - expected).norm(dim=1).median() for mode in ("transformers", "native")]
    assert steps_of(model) == TOKENS
    assert errors[1] <= 1.25 * errors[0] and errors[1] <= 0.05 * expected.norm(dim=1).median()


def test_biases_are_added(tmp_path):
    source = tiny_model("olmoe")
    config = copy.deepcopy(source.config)
    config.attention_bias = True
    torch.manual_seed(0)
    biased = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in biased.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if name.endswith("bias") else 0.3))
    model = moepack.load(write_packed(biased, tmp_path / "model", create("finequant")), dtype="float32")
    assert model.model.layers[0].self_attn.o_proj.bias is not None
    expected, _ = run(model, "transformers")
    assert_near(run(model, "native")[0], expected)
    assert steps_of(model) == TOKENS


def test_neither_threads_change_a_bit(model):
    threads = _core.threads()
    try:
        found = []
        for count in (1, 2, 5):
            _core.set_threads(count)
            found.append(run(model, "native")[0])
    finally:
        _core.set_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("isa", _core.available_isas())
def test_every_instruction_set_takes_a_step(model, isa):
    random = np.random.default_rng(0)
    x = random.standard_normal((1, 32), np.float32)
    translation = Translation(model.model)
    outputs = []
    for name in (isa, "scalar"):
        buffers = [np.zeros((2, 2, 4, 8), np.float32) for _ in translation.caches]
        outputs.append(
            [translation.decoder.step(x, n, [(*pair, 0, n) for pair in buffers], isa=name) for n in range(4)]
        )
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)


def test_a_cache_grows_and_is_cropped(model, monkeypatch):
    monkeypatch.setattr(caches, "LEAST", 3)
    tokens = ids(40)
    expected, _ = run(model, "transformers", tokens)
    found, cache = run(model, "native", tokens)
    assert_near(found, expected)
    assert all(type(layer) is GrowingLayer for layer in cache.layers)
    cache.crop(-15)
    again, cache = run(model, "native", tokens[:, 25:], cache, prompt=1)
    assert cache.get_seq_length() == 40
    assert_near(again, expected[-14:])


def test_turns_follow_each_other(model):
    """Prompts between decoded tokens: transformers reads them into the same cache."""
    first, second = ids(20), ids(20, seed=4)
    found, expected = [], []
    for mode, results in (("native", found), ("transformers", expected)):
        logits, cache = run(model, mode, first)
        results += [logits, run(model, mode, second, cache, prompt=7)[0]]
    assert_near(torch.cat(found), torch.cat(expected))
    assert steps_of(model) == 15 + 13


def test_a_cache_may_be_looked_at_and_written_between_steps(model):
    tokens = ids(20)
    expected, _ = run(model, "native", tokens)
    with torch.inference_mode():
        state = model(tokens[:, :PROMPT], use_cache=True)
        cache = state.past_key_values
        for number in range(PROMPT, 20):
            state = model(tokens[:, number : number + 1], past_key_values=cache, use_cache=True)
            assert torch.equal(state.logits[0, -1], expected[number - PROMPT])
            for layer in cache.layers[: number % 3]:
                assert layer.keys.shape == layer.values.shape == (1, 2, number + 1, 8)
                layer.keys = layer.keys.clone()
    # The core does not support fewer keys than values.
    cache.layers[0].keys = cache.layers[0].keys[:, :, :-1]
    assert cache.layers[0].form is None and cache.layers[1].form is not None


def test_a_copied_cache_goes_its_own_way(model):
    tokens = ids(20)
    _, cache = run(model, "native", tokens[:, :12])
    before = [layer.keys.clone() for layer in cache.layers]
    twin = copy.deepcopy(cache)
    one, _ = run(model, "native", tokens[:, 12:], cache, prompt=1)
    other, _ = run(model, "native", tokens[:, 12:], twin, prompt=1)
    assert torch.equal(one, other)
    assert all(torch.equal(a, layer.keys[:, :, :12]) for a, layer in zip(before, cache.layers, strict=True))


def test_a_cache_outlives_inference_mode(model):
    tokens = ids(16)
    expected, _ = run(model, "transformers", tokens)
    _, cache = run(model, "native", tokens[:, :10])
    with torch.no_grad():
        state = model(tokens[:, 10:12], past_key_values=cache, use_cache=True)
        for number in range(12, 16):
            state = model(tokens[:, number : number + 1], past_key_values=cache, use_cache=True)
            assert_near(state.logits[0, -1], expected[number - PROMPT])


def test_generation_is_that_of_transformers(model):
    prompt = ids(6)
    for settings in (
        {"do_sample": False},
        {"do_sample": True, "temperature": 2.0},
        {"num_beams": 3, "do_sample": False},
    ):
        outputs = []
        for mode in ("transformers", "native"):
            set_decoding(mode)
            torch.manual_seed(0)
            mask = torch.ones_like(prompt)
            new = {"max_new_tokens": 20, "min_new_tokens": 20}
            outputs.append(model.generate(prompt, attention_mask=mask, **new, **settings))
        assert torch.equal(*outputs)
    assert steps_of(model) == 2 * 19


def test_other_calls_are_transformers(model):
    """Each of these needs something that the core does not support."""
    tokens = ids(7)
    with torch.inference_mode():
        prompt = model(tokens, use_cache=True)

    def attempt(**kwargs):
        past = copy.deepcopy(prompt.past_key_values)
        return model(**{"input_ids": tokens[:, :1], "past_key_values": past, "use_cache": True, **kwargs})

    mask = torch.ones(1, 8, dtype=torch.long)
    with torch.inference_mode():
        attempt(attention_mask=mask)
        assert steps_of(model) == 1
        mask[0, 0] = 0
        attempt(attention_mask=mask)
        attempt(input_ids=tokens[:, :2])
        attempt(past_key_values=None)
        attempt(past_key_values=StaticCache(model.config, 20))
        attempt(output_hidden_states=False, past_key_values=DynamicCache())
        batch = model(tokens.repeat(2, 1), use_cache=True)
        attempt(input_ids=tokens[:, :1].repeat(2, 1), past_key_values=batch.past_key_values)
        with torch.autocast("cpu", torch.bfloat16):
            attempt()
        model.train()
        attempt()
        model.eval()
    attempt()
    assert steps_of(model) == 1
    with torch.inference_mode():
        hidden = attempt(output_hidden_states=True).hidden_states
        assert len(hidden) == 3 and steps_of(model) == 1
        # Transformers leaves its hooks on the layers; they record only during a call that requests it.
        assert attempt().logits.isfinite().all() and steps_of(model) == 2
        again = attempt(output_hidden_states=True).hidden_states
    assert steps_of(model) == 2 and all(map(torch.equal, hidden, again))


@pytest.mark.parametrize("change", ["hook", "forward", "child", "weight", "moved", "mode"])
def test_changes_of_a_model_are_seen(directory, change):
    model = moepack.load(directory("qwen3_moe", dense_bits=8), dtype="float32")
    before, _ = run(model, "native")
    layer = model.model.layers[1]
    seen = []
    if change == "hook":
        layer.mlp.register_forward_hook(lambda *arguments: seen.append(1))
    elif change == "forward":
        norm = layer.input_layernorm
        norm.forward = lambda x: 2 * type(norm).forward(norm, x)
    elif change == "child":
        layer.self_attn.q_proj = torch.nn.Sequential(layer.self_attn.q_proj, torch.nn.Tanh())
    elif change == "weight":
        layer.mlp.gate.weight = torch.nn.Parameter(-layer.mlp.gate.weight)
    elif change == "moved":
        layer.input_layernorm.weight.data = layer.input_layernorm.weight.data * 2
    else:
        moepack.set_compute_mode("int8", model)
    after, _ = run(model, "native")
    expected, _ = run(model, "transformers")
    assert_near(after, expected)
    # The core may decode the first step of each run, and none of an unsupported computation.
    assert (change in ("weight", "moved", "mode")) == (steps_of(model) == 2 * TOKENS)
    assert change == "hook" or not torch.equal(before, after)
    assert len(seen) == (2 * (TOKENS + 1) if change == "hook" else 0)


def test_values_written_into_a_weight_are_used(model):
    run(model, "native")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(-3)
    found, _ = run(model, "native")
    assert_near(found, run(model, "transformers")[0])


def test_copies_of_a_model_decode_by_themselves(model):
    expected, _ = run(model, "native")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert torch.equal(run(twin, "native")[0], expected) and steps_of(twin) == TOKENS
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(run(again, "native")[0], expected) and steps_of(again) == TOKENS


def test_models_that_are_not_known_are_left_alone(directory):
    model = moepack.load(directory("phimoe"), dtype="float32")
    assert "forward" not in vars(model.model) and "forward" not in vars(model.lm_head)
    clipped = moepack.load(directory("olmoe"), dtype="float32")
    clipped.config.clip_qkv = 0.5
    with pytest.raises(Unknown, match="clipped"):
        Translation(clipped.model)
    assert_near(run(clipped, "native")[0], run(clipped, "transformers")[0])
    assert steps_of(clipped) == 0


def test_the_choice_is_checked(monkeypatch):
    monkeypatch.setenv(VARIABLE, "transformers")
    assert decoding() == "transformers"
    set_decoding("native")
    assert decoding() == "native"
    set_decoding(None)
    monkeypatch.setenv(VARIABLE, "torch")
    with pytest.raises(ValueError, match="native, transformers"):
        decoding()
    with pytest.raises(ValueError, match="decoding is"):
        set_decoding("python")


def test_the_core_rejects_mismatched_arguments(model):
    translation = Translation(model.model)
    x = np.zeros((1, 32), np.float32)
    buffers = [np.zeros((2, 2, 4, 8), np.float32) for _ in translation.caches]
    caches = [(*pair, 0, 0) for pair in buffers]
    with pytest.raises(ValueError, match="no room"):
        translation.decoder.step(x, 4, [(*pair, 0, 4) for pair in buffers])
    with pytest.raises(ValueError, match="visible from 1"):
        translation.decoder.step(x, 4, [(*pair, 1, 0) for pair in buffers])
    with pytest.raises(ValueError, match="caches of 2 layers"):
        translation.decoder.step(x, 0, caches[:1])
    with pytest.raises(ValueError, match="one token"):
        translation.decoder.step(np.zeros((2, 32), np.float32), 0, caches)
    with pytest.raises(TypeError, match="cache"):
        translation.decoder.step(x, 0, [(1, 2, 0, 0)])
    with pytest.raises(ValueError, match="instead of"):
        translation.decoder.step(np.zeros((1, 31), np.float32), 0, caches)
    with pytest.raises(ValueError, match="dtype"):
        _core.DenseMatrix(np.zeros(8, np.uint8), "float16", 2, 2)
    with pytest.raises(ValueError, match="do not hold"):
        _core.DenseMatrix(np.zeros(8, np.uint8), "float32", 2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dense_head_takes_few_tokens_in_the_core(dtype, monkeypatch):
    head = torch.nn.Linear(64, 40, bias=False, dtype=dtype)
    states, taken = torch.randn(2, FEW // 2, 64, dtype=dtype), HeadForward(head)
    with torch.inference_mode():
        expected = head(states)
        assert torch.allclose(taken(states), expected, rtol=2e-2, atol=1e-2)
        monkeypatch.setattr(HeadForward, "original", lambda self, x: "torch")
        assert taken(states).shape == expected.shape
        assert taken(torch.cat([states, states[:1, :1].expand(2, 1, 64)], dim=1)) == "torch"
        assert taken(states[:0]) == "torch"


def test_the_decoder_is_reported(directory, model):
    assert str(tried(model)) == "decoded by moepack's decoder"
    assert (stepping(model).taken, stepping(model).left) == (3, 0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        state = model(ids(4), use_cache=True)
        model(ids(1), past_key_values=state.past_key_values, use_cache=True)
    assert str(stepping(model)) == (
        "decoded by moepack's decoder in 3 steps and by transformers in 1 "
        "(not supported by moepack's decoder: steps under autocast)"
    )
    set_decoding("transformers")
    assert "set_decoding" in str(tried(model)) and tried(model).taken == 0
    set_decoding(None)
    clipped = moepack.load(directory("olmoe"), dtype="float32")
    clipped.config.clip_qkv = 0.5
    assert str(tried(clipped)) == "decoded by transformers (not supported by moepack's decoder: clipped heads)"
    other = moepack.load(directory("phimoe"), dtype="float32")
    assert str(tried(other)).endswith("; this is phimoe)")
    assert "not packed" in str(tried(tiny_model("mixtral")))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_both_spellings_of_the_cache_are_read(model, name):
    """The one of the installed transformers, called by keyword or by position."""
    with torch.inference_mode():
        forward = model.model.forward
        cache = new_cache(model)
        forward(input_ids=ids(5), use_cache=True, **{cache_name(type(model.model).forward): cache})
        expected = forward(input_ids=ids(1), use_cache=True, **{name: cache}).last_hidden_state
        assert forward.steps == 1
        cache.crop(-1)
        parameters = list(forward.__signature__.parameters)
        given = {"input_ids": ids(1), cache_name(type(model.model).forward): cache}
        found = forward(*(given.get(each) for each in parameters[: parameters.index("inputs_embeds")]))
        assert forward.steps == 2 and torch.equal(found.last_hidden_state, expected)
        assert cached(found) is cache and cached(object()) is None


def test_calls_that_a_forward_does_not_take_are_left_to_it():
    class Module:
        def forward(self, input_ids=None, past_key_values=None, use_cache=None):
            return input_ids

    reader = CallReader(Module.forward)
    assert reader.cache == "past_key_values"
    assert reader.read((1,), {"cache": 2}) is None and reader.read((1, 2, 3, 4), {}) is None
    assert reader.read((), {"input_ids": 1, "past_key_values": 2}).cache == 2

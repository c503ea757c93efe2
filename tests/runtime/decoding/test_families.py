"""Decoding in the core equals transformers for every supported family, token by token and in one pass."""

from pathlib import Path
from typing import Any

import pytest
import torch

import moepack
from moepack import _core
from moepack.backends.cpu import views
from moepack.census.tiny import tiny_config, tiny_model
from moepack.decoding.cache import GrowingWindow, Tokens
from moepack.decoding.decoder import set_decoding
from moepack.decoding.families import FAMILIES, decoder_of
from moepack.decoding.translation import Translation, Unknown
from moepack.decoding.translation import window as window_of
from moepack.methods import create
from runtime_support import write_packed

PROMPT, TOKENS = 5, 12
WINDOW = 8
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 without query latents, groups": (
        "deepseek_v2",
        {"q_lora_rank": None, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("deepseek_v3", {"n_group": 2, "topk_group": 1, "norm_topk_prob": True}),
    "deepseek_v3 in halves": ("deepseek_v3", {"rope_interleave": False}),
    "glm4_moe": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
    "gpt_oss": ("gpt_oss", {"sliding_window": WINDOW}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "qwen3_next": ("qwen3_next", {}),
}
"""Architectures, and settings that differ from the smallest model's."""


@pytest.fixture(scope="module", autouse=True)
def default_decoding() -> Any:
    yield
    set_decoding(None)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a variant, and whether linear layers are packed as well, to a packed directory."""
    made: dict[tuple[str, bool], Path] = {}

    def make(variant: str, dense: bool) -> Path:
        if (variant, dense) not in made:
            architecture, settings = VARIANTS[variant]
            path = tmp_path_factory.mktemp("packed") / "model"
            method = create("finequant", bits=8, **({"dense_bits": 8} if dense else {}))
            made[variant, dense] = write_packed(tiny_model(architecture, own=settings), path, method)
        return made[variant, dense]

    return make


def ids(seed: int = 3) -> torch.Tensor:
    return torch.randint(3, 60, (1, PROMPT + TOKENS), generator=torch.Generator().manual_seed(seed))


def run(model: Any, mode: str) -> tuple[torch.Tensor, Any]:
    """Logits of each token after a prompt, read one by one, and the cache."""
    set_decoding(mode)
    found = []
    with torch.inference_mode():
        state = model(ids()[:, :PROMPT], use_cache=True)
        for token in ids()[:, PROMPT:].split(1, dim=1):
            state = model(token, past_key_values=state.past_key_values, use_cache=True)
            found.append(state.logits[0, -1].float())
    return torch.stack(found), state.past_key_values


def assert_near(found: torch.Tensor, expected: torch.Tensor, bound: float = 2e-5) -> None:
    """Equal up to the rounding of float32; `bound` is of the largest value, measured 2e-6."""
    assert (found - expected).abs().max() <= bound * expected.abs().max()


def test_every_family_is_tried() -> None:
    tried = {architecture for architecture, _ in VARIANTS.values()}
    assert tried == set(FAMILIES) - {"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}  # test_decoder.py


CASES = [(variant, False) for variant in VARIANTS] + [(name, True) for name in ("deepseek_v2", "gpt_oss", "qwen3_next")]


@pytest.mark.parametrize(("variant", "dense"), CASES)
def test_steps_match_transformers(packed: Any, variant: str, dense: bool) -> None:
    model = moepack.load(packed(variant, dense), dtype="float32", mode="exact")
    expected, expected_cache = run(model, "transformers")
    found, cache = run(model, "native")
    assert decoder_of(model).forward.steps == TOKENS
    assert_near(found, expected)
    with torch.inference_mode():
        assert_near(model(ids()).logits[0, PROMPT:].float(), found)
    for mine, theirs in zip(cache.layers, expected_cache.layers, strict=True):
        for mine_of, theirs_of in zip(held(mine), held(theirs), strict=True):
            assert_near(mine_of, theirs_of)


def held(layer: Any) -> list[torch.Tensor]:
    """What a layer of a cache holds."""
    if hasattr(layer, "recurrent_states"):
        return [layer.conv_states[0], layer.recurrent_states[0]]
    return [layer.keys, layer.values]


@pytest.mark.parametrize("variant", ["deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_next"])
def test_bfloat16_loses_no_more_than_transformers_does(packed: Any, variant: str) -> None:
    """Both are compared with float32; the median ignores single tokens whose experts change by rounding."""
    path = packed(variant, False)
    expected, _ = run(moepack.load(path, dtype="float32"), "transformers")
    model = moepack.load(path, dtype="bfloat16")
    errors = [(run(model, mode)[0] - expected).norm(dim=1).median() for mode in ("transformers", "native")]
    assert decoder_of(model).forward.steps == TOKENS
    assert errors[1] <= 1.25 * errors[0]


@pytest.mark.parametrize("variant", ["deepseek_v3", "gpt_oss", "qwen3_5_moe"])
def test_generation_is_that_of_transformers(packed: Any, variant: str) -> None:
    model = moepack.load(packed(variant, False), dtype="float32")
    outputs = []
    for mode in ("transformers", "native"):
        set_decoding(mode)
        settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
        outputs.append(model.generate(ids()[:, :6], attention_mask=torch.ones(1, 6, dtype=torch.long), **settings))
    assert torch.equal(*outputs) and decoder_of(model).forward.steps == 11


@pytest.mark.parametrize("variant", ["deepseek_v2", "glm4_moe", "gpt_oss", "qwen3_next"])
def test_instruction_sets_and_threads_give_the_same_results(packed: Any, variant: str) -> None:
    model = decoder_of(moepack.load(packed(variant, False), dtype="float32", mode="exact"))
    translation, threads = Translation(model), _core.threads()
    outputs: list[torch.Tensor] = []
    try:
        for isa, count in [*((isa, 2) for isa in _core.available_isas()), ("scalar", 1)]:
            _core.set_threads(count)
            buffers = [empty(expected) for expected in translation.caches]
            x = torch.ones(1, model.config.hidden_size)
            steps = [
                translation.decoder.step(views.activations(x), n, [(*pair, 0, n) for pair in buffers], isa=isa)
                for n in range(3)
            ]
            outputs.append(torch.stack(list(map(torch.from_numpy, steps))))
    finally:
        _core.set_threads(threads)
    for output in outputs:
        torch.testing.assert_close(output, outputs[0], rtol=1e-5, atol=1e-5)
    scalar = _core.available_isas().index("scalar")
    assert torch.equal(outputs[scalar], outputs[-1])


def empty(expected: Any) -> Any:
    """Room for four tokens, or empty states."""
    if isinstance(expected, Tokens):
        return tuple(torch.zeros(expected.form.heads, 4, width).numpy() for width in expected.form.widths)
    return torch.zeros(expected.window).numpy(), torch.zeros(expected.state[1:]).numpy()


def test_windows_slide_in_place(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers of a window have room for few tokens, and are inspected and filled between steps."""
    monkeypatch.setattr("moepack.decoding.cache.LEAST", 3)
    model = moepack.load(packed("gpt_oss", False), dtype="float32")
    results = []
    for mode in ("transformers", "native"):
        _, cache = run(model, mode)
        with torch.inference_mode():
            state = model(ids(4)[:, :3], past_key_values=cache, use_cache=True)
            logits = [state.logits[0, -1]]
            for token in ids(5)[:, :10].split(1, dim=1):
                window = next(layer for layer in cache.layers if layer.is_sliding)
                assert window.keys.shape[2] == window.values.shape[2] == WINDOW - 1
                logits.append(model(token, past_key_values=cache, use_cache=True).logits[0, -1])
        assert (type(window) is GrowingWindow) == (mode == "native")
        assert window.get_seq_length() == PROMPT + TOKENS + 3 + 10
        results.append(torch.stack(logits))
    assert_near(results[1], results[0])


def test_values_written_into_the_expansion_of_latents_are_used(packed: Any) -> None:
    model = moepack.load(packed("deepseek_v2", False), dtype="float32")
    run(model, "native")
    with torch.no_grad():
        model.model.layers[0].self_attn.kv_b_proj.weight.mul_(-2)
    assert_near(run(model, "native")[0], run(model, "transformers")[0])


@pytest.mark.parametrize(("kinds", "window"), [(["full_attention"] * 2, None), (["sliding_attention"] * 2, WINDOW)])
def test_layers_report_their_activations(kinds: list[str], window: int | None) -> None:
    config = tiny_config("gpt_oss")
    config.layer_types, config.sliding_window = kinds, WINDOW
    assert window_of(config, 1) == window
    config.layer_types = ["chunked_attention"] * 2
    with pytest.raises(Unknown, match="chunked"):
        window_of(config, 1)

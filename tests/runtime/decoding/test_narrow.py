"""Keys and values in 8 bits: the encoding, the layers of the cache, and decoding in the core and in transformers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

import moepack
from moepack.census.tiny import tiny_model
from moepack.decoding.decoder import set_decoding
from moepack.decoding.families import decoder_of
from moepack.decoding.narrow import NarrowLayer, NarrowWindow, decode, encode
from moepack.decoding.prefix import Prefix, forked, new_cache, set_kv_bits
from moepack.methods import create
from moepack.serving.step import Part, Stepper
from moepack.serving.text.generation import Memory, generate
from moepack.serving.text.sampling import Sampling
from runtime_support import letters, write_packed

PROMPT, TOKENS, WINDOW = 5, 12, 8
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "glm4_moe": {},
    "deepseek_v2": {},
    "gpt_oss": {"sliding_window": WINDOW},
    "qwen3_next": {},
}


@pytest.fixture(scope="module", autouse=True)
def default_decoding() -> Any:
    yield
    set_decoding(None)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "model"
    model = tiny_model(request.param, own=ARCHITECTURES[request.param])
    return write_packed(model, path, create("finequant", bits=8, calibration="none"))


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def read(model: Any, mode: str, cache: Any) -> torch.Tensor:
    """Logits after each token that follows a prompt."""
    set_decoding(mode)
    ids = torch.randint(3, 60, (1, PROMPT + TOKENS), generator=torch.Generator().manual_seed(3))
    found = []
    with torch.inference_mode():
        for piece in (ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)):
            found.append(model(piece, past_key_values=cache, use_cache=True).logits[0, -1].float())
    return torch.stack(found)


@pytest.mark.parametrize("size", [1e-30, 1.0, 3e38])
def test_values_are_off_by_at_most_half_a_step(size: float) -> None:
    values = numbers(2, 3, 5, 16).clamp(-1, 1) * size
    rows = encode(values)
    assert rows.dtype == torch.int8 and rows.shape == (2, 3, 5, 20)
    assert (rows[..., :-4].abs().amax(-1) == 127).all()
    largest = values.abs().amax(-1, keepdim=True)
    assert ((decode(rows, torch.float32) - values).abs() <= largest / 253.9).all()


def test_zeros_and_values_that_are_not_finite() -> None:
    rows = torch.zeros(4, 6)
    rows[1, 2], rows[2, 0], rows[3] = torch.nan, torch.inf, 1.0
    found = decode(encode(rows), torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert (found[0] == 0).all() and found[1:3].isnan().all() and (found[3] == 1).all()


def test_the_least_floats_keep_their_signs() -> None:
    values = torch.arange(-400, 401)[:, None] * torch.tensor([2.0**-149, 2.0**-150, 0.0])
    found = decode(encode(values), torch.float32)
    assert (found * values >= 0).all() and ((found - values).abs() <= 64 * 2.0**-149).all()


@pytest.mark.parametrize("width", [6, 7, 8])
def test_a_single_row_is_decoded(width: int) -> None:
    row = numbers(1, 1, 1, width)
    assert ((decode(encode(row), torch.float32) - row).abs() <= row.abs().amax() / 253.9).all()


@pytest.mark.parametrize("kind", ["all", "window"])
def test_a_layer_gives_what_its_decoded_rows_are(kind: str) -> None:
    layer: Any = NarrowLayer() if kind == "all" else NarrowWindow(sliding_window=WINDOW)
    keys, values = numbers(1, 2, 20, 8), numbers(1, 2, 20, 4, seed=2)
    rounded = [decode(encode(each), torch.float32) for each in (keys, values)]
    first = 0
    for count in (3, 1, 1, 9, 6):
        pieces = [each[:, :, first : first + count] for each in (keys, values)]
        found = layer.update(*pieces)
        first += count
        kept = found[0].shape[2]
        assert kept == first or (kind == "window" and kept >= min(first, WINDOW - 1 + count))
        for part, expected in zip(found, rounded, strict=True):
            torch.testing.assert_close(part, expected[:, :, first - kept : first], rtol=0, atol=0)
    assert layer.keys.dtype == torch.int8 and layer.get_seq_length() == 20
    twin = copy.deepcopy(layer)
    torch.testing.assert_close(twin.keys, layer.keys)
    assert twin.keys.data_ptr() != layer.keys.data_ptr()
    if kind == "all":
        layer.crop(-5)
        torch.testing.assert_close(decode(layer.keys, torch.float32), rounded[0][:, :, :15], rtol=0, atol=0)


def test_the_core_decodes_with_them(packed: Path) -> None:
    model = moepack.load(packed, dtype="float32", kv_bits=8)
    caches = {mode: new_cache(model) for mode in ("native", "transformers")}
    found = {mode: read(model, mode, cache) for mode, cache in caches.items()}
    assert decoder_of(model).forward.steps == TOKENS
    set_kv_bits(model, None)
    exact = read(model, "transformers", new_cache(model))
    scale = exact.abs().max()
    # Both round, at different places of the sums, so a code may differ by one.
    assert (found["native"] - found["transformers"]).abs().max() <= 0.02 * scale
    for mode in found:
        assert 0 < (found[mode] - exact).abs().max() <= 0.05 * scale
    for one, other in zip(caches["native"].layers, caches["transformers"].layers, strict=True):
        if isinstance(one, (NarrowLayer, NarrowWindow)):
            assert (one.keys[..., :-4].int() - other.keys[..., :-4].int()).abs().max() <= 8
            assert one.keys.shape == other.keys.shape


def uneven(model: Any) -> None:
    """Give heads of the first layer's values rows of zeros, of one value, of a wide range, and of the least floats."""
    attention = model.model.layers[0].self_attn
    heads = attention.v_proj.weight.detach().view(-1, attention.head_dim, attention.v_proj.in_features)
    heads[0].zero_()
    heads[1:2] = heads[1:2, :1].expand_as(heads[1:2])
    heads[2] *= torch.logspace(-12, 12, attention.head_dim)[:, None]
    heads[3] *= 1e-43


@pytest.mark.parametrize("architecture", ["glm4_moe", "deepseek_v2", "gpt_oss"])
def test_the_core_writes_what_is_encoded(architecture: str, tmp_path: Path) -> None:
    """The first layer's rows do not depend on the cache, so a cache in float32 holds what the other one encoded."""
    model = tiny_model(architecture, own={"num_key_value_heads": 4, **ARCHITECTURES[architecture]})
    if architecture == "glm4_moe":
        uneven(model)
    packed = write_packed(model, tmp_path / "model", create("finequant", bits=8, calibration="none"))
    model = moepack.load(packed, dtype="float32")
    wide = new_cache(model)
    set_kv_bits(model, 8)
    narrow = new_cache(model)
    for cache in (wide, narrow):
        read(model, "native", cache)
    assert decoder_of(model).forward.steps == 2 * TOKENS
    for part in ("keys", "values"):
        floats, rows = (getattr(cache.layers[0], part)[:, :, -TOKENS:] for cache in (wide, narrow))
        assert floats.dtype == torch.float32 and rows.dtype == torch.int8 and rows[..., :-4].any()
        assert torch.equal(encode(floats), rows)


def test_prefixes_and_forks_keep_8_bits(packed: Path) -> None:
    model = moepack.load(packed, dtype="float32", kv_bits=8)
    cache = new_cache(model)
    read(model, "native", cache)
    twin = forked(cache)
    for one, other in zip(cache.layers, twin.layers, strict=True):
        if isinstance(one, (NarrowLayer, NarrowWindow)):
            assert torch.equal(one.keys, other.keys) and type(one) is type(other)
    prefix = Prefix(list(range(PROMPT + TOKENS)), cache)
    if prefix.is_useful:
        assert prefix.continued([0, 1, 2, 99]).get_seq_length() == 3


def test_sequences_share_a_step(packed: Path) -> None:
    model = moepack.load(packed, dtype="float32", kv_bits=8)
    stepper = Stepper(model)
    prompts = [list(range(3 + start, 9 + start)) for start in (0, 7, 20)]

    def logits(parts: list[list[int]], caches: list[Any], place: int) -> torch.Tensor:
        given = [Part(ids, place, cache) for ids, cache in zip(parts, caches, strict=True)]
        return torch.stack([row for row in stepper.forward(given) if isinstance(row, torch.Tensor)])

    with torch.inference_mode():
        together, alone = ([new_cache(model) for _ in prompts] for _ in range(2))
        for place, pieces in ((0, prompts), (6, [[5], [6], [7]]), (7, [[8], [9], [5]])):
            found = logits(pieces, together, place)
            expected = [logits([ids], [cache], place) for ids, cache in zip(pieces, alone, strict=True)]
            assert len(found) == 3 and (found - torch.cat(expected)).abs().max() <= 0.02 * found.abs().max()
    assert any(isinstance(layer, (NarrowLayer, NarrowWindow)) for layer in together[0].layers)


@pytest.mark.parametrize("remembers", [False, True])
def test_generation_uses_them(remembers: bool, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = moepack.load(packed, dtype="float32", kv_bits=8)
    caches, generated = [], model.generate

    def spied(**given: Any) -> Any:
        caches.extend(value for value in given.values() if isinstance(value, DynamicCache))
        return generated(**given)

    monkeypatch.setattr(model, "generate", spied)
    memory = Memory() if remembers else None
    report = generate(model, letters(), "abcdefghijkl", Sampling(max_new_tokens=4), memory=memory)
    (cache,) = caches
    assert cache.get_seq_length() == 12 + report.tokens - 1
    assert any(isinstance(layer, (NarrowLayer, NarrowWindow)) for layer in cache.layers)
    assert not any(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


@pytest.mark.parametrize("bits", [4, 16, 0])
def test_other_numbers_of_bits_are_refused(bits: int, packed: Path) -> None:
    with pytest.raises(ValueError, match="kv_bits must be 8"):
        moepack.load(packed, kv_bits=bits)


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    directory = write_packed(tiny_model("switch_transformers"), tmp_path / "model", create("finequant", bits=8))
    with pytest.raises(ValueError, match="kv_bits needs a decoder-only model"):
        moepack.load(directory, kv_bits=8)

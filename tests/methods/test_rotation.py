"""Rotations: orthogonal, learned on activations, folded without changing the model, and kept for resumed runs."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, OlmoeConfig, OlmoeForCausalLM

import moepack
import packed_support as support
import tiny_models
from moepack.calibration.load import load_samples
from moepack.checkpoint import Checkpoint, describe
from moepack.checkpoint.rewritten import RewrittenCheckpoint
from moepack.errors import DiskError, InvalidTensorError, ResumeError, UnsupportedModelError
from moepack.methods import CodeQuant
from moepack.methods.codequant.rotation import (
    Grouping,
    fold,
    group_columns,
    is_orthogonal,
    learn,
    normalized_states,
    start,
)
from moepack.methods.codequant.rotation.cayley import rounding_error
from moepack.pipeline import compress
from moepack.pipeline.rewrite import STATE
from moepack.solvers.fixed_point import split_blocks
from moepack.solvers.kmeans import kmeans


def method(text, **settings):
    return CodeQuant(**{"calibration": str(text), "samples": 6, "sequence_length": 64, "steps": 1, **settings})


def outliers(tokens=600, width=32):
    """States with a few channels of large values, the same for all tokens."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, width, generator=generator)
    states[:, 3] *= 30
    states[:, 17] -= 20
    return states


@pytest.mark.parametrize("kind", ["random", "hadamard"])
@pytest.mark.parametrize("width", [1, 6, 7, 64, 96])
def test_starts_are_orthogonal_and_follow_the_seed(kind, width):
    assert is_orthogonal(start(width, kind))
    assert torch.equal(start(width, kind, 1), start(width, kind, 1))
    assert width == 1 or not torch.equal(start(width, kind, 1), start(width, kind, 2))


def test_non_orthogonal_matrices_are_detected():
    matrix = start(8, "random")
    for bad in (matrix * 1.01, matrix[:4], torch.full((8, 8), torch.nan), torch.zeros(8, 8), matrix[0]):
        assert not is_orthogonal(bad)
    with pytest.raises(ValueError, match="random or hadamard"):
        start(8, "identity")


@pytest.mark.parametrize("bits", [4, 8])
def test_learning_lowers_the_error_of_states_it_has_not_seen(bits):
    states, fresh = outliers(), outliers(1200)[600:]
    first = start(32, "random")
    found = learn(states, bits, first, 96)
    plain, before, after = found.errors
    assert is_orthogonal(found.rotation) and after < before < plain
    assert rounding_error(fresh @ found.rotation, bits) < 0.97 * rounding_error(fresh @ first, bits)
    assert torch.equal(learn(states, bits, first, 0).rotation, first)


def olmoe(directory: Path) -> Path:
    config = OlmoeConfig(
        vocab_size=300, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    OlmoeForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "deepseek_v2", "olmoe"])
def test_a_folded_model_computes_the_same(architecture, tiny_checkpoint, tmp_path):
    source = olmoe(tmp_path / "olmoe") if architecture == "olmoe" else tiny_checkpoint(architecture)
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in original.named_parameters():
        if "norm" in name:  # random models have norms of ones, which would hide a missing norm
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    original.save_pretrained(tmp_path / "float32")
    checkpoint = Checkpoint.open(tmp_path / "float32")
    folding = fold(checkpoint, start(64, "random"))
    tensors = {name: folding.tensor(name).contiguous() for name in folding.names}
    (tmp_path / "folded").mkdir()
    safetensors.torch.save_file(tensors, tmp_path / "folded" / "model.safetensors", metadata={"format": "pt"})
    config = original.config
    config.update(dict(folding.config))
    config.save_pretrained(tmp_path / "folded")
    folded = AutoModelForCausalLM.from_pretrained(tmp_path / "folded", dtype=torch.float32)
    ids = torch.randint(3, 250, (2, 40), generator=generator)
    with torch.inference_mode():
        expected, found = original(input_ids=ids).logits, folded(input_ids=ids).logits
    assert ((found - expected).abs().amax() / expected.abs().amax()) <= 1e-3
    assert not torch.equal(folded.model.embed_tokens.weight, original.model.embed_tokens.weight)


def test_models_that_cannot_be_rotated_are_refused(switch, mixtral, text, tmp_path):
    with pytest.raises(UnsupportedModelError, match="--rotation none"):
        compress(switch, tmp_path / "out", method=method(text, rotation="random"))
    checkpoint = Checkpoint.open(mixtral)
    for matrix in (start(64, "random") * 1.1, start(32, "random")):
        with pytest.raises(InvalidTensorError, match="orthogonal"):
            fold(checkpoint, matrix)
    names = checkpoint.names
    checkpoint.names = lambda: (*names(), "model.layers.0.self_attn.surprise.weight")
    checkpoint._tensors["model.layers.0.self_attn.surprise.weight"] = checkpoint.info(names()[0])
    with pytest.raises(UnsupportedModelError, match="surprise"):
        fold(checkpoint, start(64, "random"))


def test_a_rewritten_checkpoint_reads_like_any_other(mixtral, text):
    checkpoint = Checkpoint.open(mixtral)
    rewriting = method(text, rotation="random").rewrite(checkpoint, describe(checkpoint), None)
    assert rewriting is not None
    changed = RewrittenCheckpoint(checkpoint, rewriting)
    assert "lm_head.weight" in changed and "lm_head.weight" not in checkpoint
    for name in changed.names():
        info = changed.info(name)
        assert tuple(changed.tensor(name).shape) == info.shape and changed.raw(name).nbytes == info.nbytes
    assert changed.info("model.layers.0.block_sparse_moe.gate.weight").dtype == torch.float32
    assert changed.tensor("model.layers.0.self_attn.q_proj.weight").dtype == torch.float32
    assert changed.config["tie_word_embeddings"] is False and changed.fingerprint() != checkpoint.fingerprint()


def test_states_are_the_layers_inputs_without_the_norms_weights(mixtral, text):
    checkpoint = Checkpoint.open(mixtral)
    samples = load_samples(checkpoint, text, 4, 64)
    states = normalized_states(checkpoint, describe(checkpoint), samples, 500, torch.device("cpu"))
    assert states.shape == (500, 64)
    energy = states.square().mean(1)  # below one by the norms' epsilon
    assert energy.max() <= 1.001 and energy.min() > 0.9


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v2"])
def test_a_rotated_model_packs_loads_and_comes_close(architecture, tiny_checkpoint, text, tmp_path):
    source = tiny_checkpoint(architecture)
    report = compress(source, tmp_path / "out", method=method(text, activation_bits=8, rotation_steps=16))
    assert any("learned rotation" in note for note in report.notes)
    assert moepack.verify(tmp_path / "out").ok and not (tmp_path / f"out{STATE}").exists()
    model = moepack.load(tmp_path / "out", dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.arange(20, 50)[None]
    with torch.inference_mode():
        expected, found = original(input_ids=ids).logits, model(input_ids=ids).logits
    assert (found - expected).square().mean().sqrt() < 0.3 * expected.std()


def test_a_resumed_run_uses_its_rotation_again_and_refuses_a_broken_one(tiny_checkpoint, text, tmp_path, monkeypatch):
    source = tiny_models.build("qwen3_moe", tmp_path / "source")
    chosen = {"rotation_steps": 8}
    uninterrupted = compress(source, tmp_path / "whole", method=method(text, **chosen))
    with support.stopping_after_each_shard(), pytest.raises(KeyboardInterrupt):
        compress(source, tmp_path / "pieces", method=method(text, **chosen))
    file = tmp_path / f"pieces{STATE}"
    good = file.read_bytes()
    state = safetensors.torch.load(good)
    with safetensors.safe_open(file, "pt") as opened:
        owner = opened.metadata()
    file.write_bytes(safetensors.torch.save({**state, "rotation": state["rotation"] * 1.5}, owner))
    with pytest.raises(ResumeError, match="orthogonal"):
        compress(source, tmp_path / "pieces", method=method(text, **chosen))
    file.write_bytes(b"no safetensors")
    with pytest.raises(ResumeError, match="cannot be read"):
        compress(source, tmp_path / "pieces", method=method(text, **chosen))
    file.write_bytes(good)
    with pytest.raises(ResumeError, match="unfinished work of another job"):
        compress(source, tmp_path / "pieces", method=method(text, **{**chosen, "rotation_steps": 9}))
    assert file.read_bytes() == good  # a rejected job keeps the state of the other
    report = compress(source, tmp_path / "pieces", method=method(text, **chosen))
    assert report.resumed_weights > 0
    assert report.notes == uninterrupted.notes and "learned rotation" in report.notes[0]
    whole, pieces = (sorted((tmp_path / name).iterdir()) for name in ("whole", "pieces"))
    assert [f.read_bytes() for f in whole] == [f.read_bytes() for f in pieces]
    stale = tmp_path / f"stale{STATE}"
    stale.write_bytes(safetensors.torch.save({**state, "rotation": -state["rotation"]}, {"owner": "another job"}))
    compress(source, tmp_path / "stale", method=method(text, **chosen))
    assert [f.read_bytes() for f in sorted((tmp_path / "stale").iterdir())] == [f.read_bytes() for f in whole]


def test_the_place_is_tried_before_a_rotation_is_learned(tiny_checkpoint, text, tmp_path, monkeypatch):
    source, rewrite = tiny_checkpoint("qwen3_moe"), CodeQuant.rewrite
    monkeypatch.setattr(CodeQuant, "rewrite", lambda *arguments: pytest.fail("worked"))
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="file"):
        compress(source, tmp_path / "file" / "out", method=method(text))
    monkeypatch.setattr(CodeQuant, "rewrite", rewrite)
    compress(source, tmp_path / "several" / "levels" / "out", method=method(text, rotation_steps=2))
    assert [entry.name for entry in (tmp_path / "several" / "levels").iterdir()] == ["out"]


def test_columns_are_grouped_as_algorithm_1_says():
    """Subgroups of two, blocks of four: the widest subgroup is paired with the narrowest."""
    weights = torch.tensor([[9.0, 1.0, 0.1, 5.0, 0.1, 1.0, 5.5, 3.0], [-9.0, 1.0, 0.1, 5.0, 0.2, 1.0, 5.5, -3.0]])
    # By mean magnitude: 0 (9), 6 (5.5) | 3 (5), 7 (3) | 1 (1), 5 (1) | 4 (0.15), 2 (0.1): spreads 6.4, 3.5, 0 and 0.
    order = group_columns(weights, 4, 2).tolist()
    assert order[:2] == [0, 6] and set(order[2:4]) in ({1, 5}, {2, 4}) and order[4:6] == [3, 7]
    assert sorted(order) == list(range(8))
    assert group_columns(weights, 8, 2).tolist() == list(range(8))
    stacked = group_columns(torch.stack([weights, weights.flip(-1)]), 4, 2)
    assert stacked[0].tolist() == order and stacked.shape == (2, 8)
    ragged = group_columns(torch.randn(3, 21), 4, 2)
    assert sorted(ragged.tolist()) == list(range(21))
    with pytest.raises(ValueError, match="subgroups of 3"):
        group_columns(weights, 4, 3)


@pytest.mark.parametrize("fused", [False, True])
def test_a_permutation_changes_the_clustering_and_keeps_the_function(fused):
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(2, 300, 8, generator=generator) for _ in range(2))
    down = torch.randn(2, 8, 300, generator=generator) * torch.rand(2, 1, 300, generator=generator) ** 4
    x = torch.randn(5, 8, generator=generator)
    base = "model.layers.0.mlp.experts."
    if fused:
        tensors = {f"{base}gate_up_proj": torch.cat([gate, up], 1), f"{base}down_proj": down}
    else:
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        tensors = {f"{base}{e}.{name}.weight": part[e] for e in range(2) for name, part in parts.items()}
    tensors["model.layers.0.mlp.gate.weight"] = torch.randn(2, 8, generator=generator)
    grouping = Grouping(tensors.__getitem__, 128)
    moved = {name: grouping.tensor(name) for name in tensors}
    assert moved["model.layers.0.mlp.gate.weight"] is tensors["model.layers.0.mlp.gate.weight"]

    def run(given, expert):
        if fused:
            first, second = given[f"{base}gate_up_proj"][expert].chunk(2)
            last = given[f"{base}down_proj"][expert]
        else:
            first, second, last = (given[f"{base}{expert}.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ first.T) * (x @ second.T)) @ last.T, last

    for expert in range(2):
        (expected, before), (found, after) = run(tensors, expert), run(moved, expert)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        errors = [
            sum(float(kmeans(part, 4).errors.sum()) for part in split_blocks(matrix, 128)) for matrix in (before, after)
        ]
        assert errors[0] != pytest.approx(errors[1], rel=1e-3)
        rows = [float(kmeans(matrix, 4).errors.sum()) for matrix in (before, after)]
        assert rows[0] == pytest.approx(rows[1], rel=1e-5)


@pytest.mark.parametrize("rotation", ["none", "random"])
def test_a_permuted_model_packs_and_stays_close(rotation, text, tmp_path):
    config = tiny_models._DECODER | {"intermediate_size": 288}
    source = tmp_path / "source"
    model = tiny_models.MixtralForCausalLM(tiny_models.MixtralConfig(**config, num_local_experts=2))
    model.to(torch.bfloat16).save_pretrained(source)
    tiny_models._tokenizer().save_pretrained(source)
    packed = {}
    for permute in (True, False):
        out = tmp_path / f"out{permute}"
        compress(source, out, method=method(text, rotation=rotation, block=128, permute=permute))
        packed[permute] = moepack.load(out, dtype=torch.float32)
    ids = torch.arange(20, 50)[None]
    with torch.inference_mode():
        expected = model.float()(input_ids=ids).logits
        found = {permute: other(input_ids=ids).logits for permute, other in packed.items()}
    assert not torch.equal(found[True], found[False])
    for logits in found.values():
        assert (logits - expected).square().mean().sqrt() < 0.3 * expected.std()

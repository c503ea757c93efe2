"""Rotations: orthogonal, learned on activations, folded so that the model stays the same, kept for resumed runs."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, OlmoeConfig, OlmoeForCausalLM

import moepack
import tiny_models
from moepack.calibration.load import load_samples
from moepack.checkpoint import Checkpoint, describe
from moepack.checkpoint.rewritten import RewrittenCheckpoint
from moepack.errors import InvalidTensorError, ResumeError, UnsupportedModelError
from moepack.methods import CodeQuant
from moepack.methods.codequant.rotation import fold, is_orthogonal, learn, normalized_states, start
from moepack.methods.codequant.rotation.cayley import rounding_error
from moepack.pipeline import compress
from moepack.pipeline.journal import Workspace
from moepack.pipeline.rewrite import STATE


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"Line {i} of a text that nobody wrote, {i * i} words long.\n" for i in range(200)))
    return file


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


def test_what_is_not_orthogonal_is_seen():
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
        if "norm" in name:  # random models have norms of ones, which would hide a forgotten one
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


def test_states_are_what_the_layers_read_without_the_norms_weights(mixtral, text):
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
    compress(source, tmp_path / "whole", method=method(text, **chosen))
    append = Workspace.append

    def die_after_the_first(self, shard):
        append(self, shard)
        raise KeyboardInterrupt

    monkeypatch.setattr(Workspace, "append", die_after_the_first)
    with pytest.raises(KeyboardInterrupt):
        compress(source, tmp_path / "pieces", method=method(text, **chosen))
    monkeypatch.setattr(Workspace, "append", append)
    file = tmp_path / f"pieces{STATE}"
    good = file.read_bytes()
    state = safetensors.torch.load(good)
    file.write_bytes(safetensors.torch.save({**state, "rotation": state["rotation"] * 1.5}))
    with pytest.raises(ResumeError, match="orthogonal"):
        compress(source, tmp_path / "pieces", method=method(text, **chosen))
    file.write_bytes(b"no safetensors")
    with pytest.raises(ResumeError, match="cannot be read"):
        compress(source, tmp_path / "pieces", method=method(text, **chosen))
    file.write_bytes(good)
    report = compress(source, tmp_path / "pieces", method=method(text, **chosen))
    assert report.resumed_weights > 0
    whole, pieces = (sorted((tmp_path / name).iterdir()) for name in ("whole", "pieces"))
    assert [f.read_bytes() for f in whole] == [f.read_bytes() for f in pieces]

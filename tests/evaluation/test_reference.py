"""Recorded references: computed once, of any size, exact, and bound to text and tokenizer."""

import gc
import math
import tempfile
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tiny_models
from moepack import CorruptionError, ReferenceMismatchError, UnsupportedModelError
from moepack.evaluation import Reference, evaluate, record_reference
from moepack.evaluation.reference import fits
from moepack.integrations.loading import open_with
from runtime_support import ARCHITECTURES, SWITCH, tiny_model

CHARS = 1600
"""Three windows for the tests' tokenizer, which has one token per character."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the sea, the wolf and the fire said nothing at all,\n" * 60, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A Mixtral with other random weights."""
    return tiny_models.build("mixtral", tmp_path_factory.mktemp("other") / "model", seed=1)


def test_a_saved_reference_gives_the_figures_of_its_model(mixtral, other, text, tmp_path):
    direct = evaluate(mixtral, text, CHARS, other, save_reference=tmp_path / "reference")
    again = evaluate(mixtral, text, CHARS, tmp_path / "reference")
    assert direct.kl > 0
    for name in ("loss", "reference_loss", "kl", "top1_agreement"):
        assert getattr(again, name) == getattr(direct, name)
    assert again.reference_loss == pytest.approx(evaluate(other, text, CHARS).loss, rel=1e-6)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "deepseek_v2"])
def test_block_by_block_is_the_model(tiny_checkpoint, text, tmp_path, architecture):
    """The logits are the same for a loaded model and block by block."""
    directory = tiny_checkpoint(architecture)
    seen = []
    loaded = record_reference(directory, text, CHARS, tmp_path / "loaded")
    streamed = record_reference(directory, text, CHARS, memory=0, progress=lambda *event: seen.append(event[:2]))
    assert not fits(directory, torch.float32, 0) and fits(directory, torch.float32)
    assert streamed.tokens == loaded.tokens == 3 * 511
    torch.testing.assert_close(streamed.logits(0, 1533), loaded.logits(0, 1533), rtol=1e-4, atol=1e-5)
    assert seen[-1][0] == seen[-1][1] == len(seen)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != SWITCH])
def test_block_by_block_is_the_model_of_every_architecture(text, tmp_path, architecture):
    model = tiny_model(architecture)
    model.config.max_position_embeddings = 1024
    if architecture == "granitemoe":
        model.config.logits_scaling, model.config.embedding_multiplier = 2.0, 1.5
    model.save_pretrained(tmp_path / "model")

    def tokenizer(*_, **__):
        return SimpleNamespace(input_ids=[(7 * i * i + i) % 61 + 3 for i in range(512)])

    options = {"tokenizer": tokenizer}
    loaded = record_reference(tmp_path / "model", text, CHARS, **options)
    streamed = record_reference(tmp_path / "model", text, CHARS, memory=0, **options)
    torch.testing.assert_close(streamed.logits(0, 511), loaded.logits(0, 511), rtol=1e-4, atol=1e-5)


def test_the_stored_reference_depends_on_the_operations_after_the_head(text, tmp_path):
    """A head that is only scaled (GraniteMoE) is stored with its inputs; for any other head, the logits are stored."""
    model = tiny_model("mixtral")
    head, file = model.lm_head.forward, tmp_path / "reference"

    def tokenizer(*_, **__):
        return SimpleNamespace(input_ids=[3] * 512)

    def kept():
        record_reference(model, text, CHARS, file, tokenizer=tokenizer)
        content = load_file(file)
        return {name: tuple(tensor.shape) for name, tensor in content.items()}

    model.config.logits_scaling = 3.0
    model.lm_head.forward = lambda states: head(states) / 3.0
    assert kept() == {"states": (511, 32), "head": (64, 32)}
    model.lm_head.forward = lambda states: torch.tanh(head(states))
    assert kept() == {"states": (511, 64)}


def test_bf16_heads_are_kept_in_bf16(mixtral, text, tmp_path):
    record_reference(mixtral, text, CHARS, tmp_path / "reference")
    content = load_file(tmp_path / "reference")
    assert content["head"].dtype == torch.bfloat16 and content["states"].dtype == torch.float32
    assert content["states"].shape == (1533, content["head"].shape[1])


def test_a_temporary_reference_leaves_nothing(mixtral, text, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reference = record_reference(mixtral, text, CHARS, memory=0)
    assert reference.file.is_relative_to(tmp_path) and reference.peak_memory > 0
    del reference
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_switch_is_recorded_and_not_streamed(switch, text):
    reference = record_reference(switch, text, 600)
    assert reference.seq2seq
    report = evaluate(switch, text, 600, reference)
    assert report.kl == pytest.approx(0, abs=1e-9) and math.isfinite(report.loss)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        record_reference(switch, text, 600, memory=0)


def test_a_bound_of_the_memory_is_one_of_the_reference_too(mixtral, text, monkeypatch):
    class Asked(Exception):
        pass

    def record(*_, memory, **__):
        raise Asked(memory)

    monkeypatch.setattr("moepack.evaluation.measure.record_reference", record)
    with pytest.raises(Asked, match="2000000"):
        evaluate(mixtral, text, CHARS, mixtral, host_memory="2MB")


def test_mismatched_parts_are_rejected(mixtral, switch, text, tmp_path):
    reference = record_reference(mixtral, text, CHARS, tmp_path / "reference")
    with pytest.raises(ReferenceMismatchError, match="another text"):
        evaluate(mixtral, text, CHARS - 1, reference)
    with pytest.raises(ReferenceMismatchError, match="one is an encoder-decoder"):
        evaluate(switch, text, CHARS, reference)
    tokenizer = transformers.AutoTokenizer.from_pretrained(mixtral)

    def shifted(*args, **options):
        return SimpleNamespace(input_ids=[token + 1 for token in tokenizer(*args, **options).input_ids])

    with pytest.raises(ReferenceMismatchError, match="another tokenizer"):
        evaluate(mixtral, text, CHARS, reference, tokenizer=shifted)


@pytest.mark.parametrize("fault", ["text", "truncated", "foreign", "head", "version"])
def test_an_invalid_reference_file_is_rejected(mixtral, text, tmp_path, fault):
    file = tmp_path / "reference"
    record_reference(mixtral, text, CHARS, file)
    with safe_open(file, "pt") as content:
        about = content.metadata()
    tensors = load_file(file)
    if fault == "text":
        file.write_text("no safetensors")
    elif fault == "truncated":
        file.write_bytes(file.read_bytes()[:-4])
    elif fault == "foreign":
        save_file(tensors, file)
    elif fault == "version":
        save_file(tensors, file, {**about, "version": "2"})
    else:
        save_file({**tensors, "head": tensors["head"][:, :-1].contiguous()}, file, about)
    with pytest.raises(CorruptionError) as caught:
        Reference(file)
    assert caught.value.file == str(file)


def test_the_reference_is_gone_before_the_model_is_loaded(mixtral, other, text, monkeypatch):
    from moepack.evaluation import measure, reference

    alive = []

    def models():
        gc.collect()
        return sum(type(each) is transformers.MixtralForCausalLM for each in gc.get_objects())

    def opened(directory, *args, **options):
        alive.append(models())
        return open_with(directory, *args)

    before = models()
    for module in (measure, reference):
        monkeypatch.setattr(module, "open_source", opened)
    evaluate(mixtral, text, CHARS, other)
    assert alive == [before, before]

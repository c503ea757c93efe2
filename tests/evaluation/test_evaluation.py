"""Evaluation: windows, span corruption, loss, and divergence from a reference, each against its definition."""

import json
import math

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import moepack
from moepack.evaluation import evaluate, span_corrupt
from moepack.methods.qmoe.ternary import Ternary

WINDOW = 512


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """About 3,000 characters, one token each for the tests' tokenizer."""
    words = np.random.default_rng(0).choice(["sea", "wolf", "the", "and", "fire,\n", "said"], 800)
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join(words), encoding="utf-8")
    return file


def distributions(directory, text, chars):
    """log-probabilities and targets of every predicted token of a decoder, one window at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = torch.tensor(tokenizer(text.read_text()[:chars], add_special_tokens=False).input_ids)
    parts, targets = [], []
    for start in range(0, len(ids) - WINDOW + 1, WINDOW):
        window = ids[start : start + WINDOW]
        with torch.inference_mode():
            parts.append(model(input_ids=window[None]).logits[0, :-1].double().log_softmax(-1))
        targets.append(window[1:])
    return torch.cat(parts), torch.cat(targets)


@pytest.mark.parametrize("chars", [600, 2900])
def test_loss_by_its_definition(mixtral, text, chars):
    log_p, targets = distributions(mixtral, text, chars)
    report = evaluate(mixtral, text, chars)
    assert report.tokens == len(targets) == chars // WINDOW * (WINDOW - 1)
    assert report.loss == pytest.approx(-log_p[torch.arange(len(targets)), targets].mean().item(), abs=1e-5)
    assert report.perplexity == pytest.approx(math.exp(report.loss))
    assert report.kl is report.reference_loss is report.top1_agreement is None


@pytest.fixture(scope="module")
def shifted(mixtral, tmp_path_factory):
    """The tiny Mixtral with other weights in its last layer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(mixtral)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.model.layers[-1].parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    directory = tmp_path_factory.mktemp("shifted") / "model"
    model.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(mixtral).save_pretrained(directory)
    return directory


def test_distance_from_a_reference_by_its_definition(mixtral, shifted, text):
    log_p, targets = distributions(mixtral, text, 1100)
    log_q, _ = distributions(shifted, text, 1100)
    report = evaluate(mixtral, text, 1100, reference=shifted)
    assert report.kl == pytest.approx((log_q.exp() * (log_q - log_p)).sum(-1).mean().item(), rel=1e-4)
    assert report.top1_agreement == pytest.approx((log_p.argmax(-1) == log_q.argmax(-1)).double().mean().item())
    assert report.reference_loss == pytest.approx(-log_q[torch.arange(len(targets)), targets].mean().item(), abs=1e-5)
    assert report.kl > 0
    assert 0 < report.top1_agreement < 1


@pytest.mark.parametrize("architecture", ["deepseek_v2", "switch_transformers"])
def test_a_model_has_no_divergence_from_itself(tiny_checkpoint, text, architecture):
    directory = tiny_checkpoint(architecture)
    report = evaluate(directory, text, 1100, reference=directory)
    assert report.kl == pytest.approx(0, abs=1e-9)
    assert report.top1_agreement == 1
    assert report.reference_loss == pytest.approx(report.loss)


def test_loaded_models_and_progress(mixtral, text):
    model = transformers.AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(mixtral)
    seen = []
    report = evaluate(model, text, 1100, tokenizer=tokenizer, progress=lambda *event: seen.append(event))
    assert [event[:2] for event in seen] == [(2, 2)]
    assert seen[-1][2] == pytest.approx(report.loss)
    with pytest.raises(ValueError, match="tokenizer"):
        evaluate(model, text)


def test_switch_progress_counts_windows(switch, text):
    seen = []
    evaluate(switch, text, 1600, progress=lambda *event: seen.append(event[:2]))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_packing_changes_nothing_but_the_experts(mixtral, text, tmp_path):
    moepack.compress(mixtral, tmp_path / "packed", method=Ternary())
    log_p, _ = distributions(tmp_path / "packed", text, 1100)
    log_q, _ = distributions(mixtral, text, 1100)
    report = evaluate(tmp_path / "packed", text, 1100, reference=mixtral)
    assert report.kl == pytest.approx((log_q.exp() * (log_q - log_p)).sum(-1).mean().item(), rel=1e-3)
    assert report.kl > 0


def test_too_little_text(mixtral, tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("a" * (WINDOW - 1))
    with pytest.raises(ValueError, match="511 tokens"):
        evaluate(mixtral, file)


def test_a_tokenizer_without_enough_sentinels(switch, text):
    tokenizer = transformers.AutoTokenizer.from_pretrained(switch)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(switch)
    tokenizer.convert_tokens_to_ids = lambda token: None
    with pytest.raises(ValueError, match="<extra_id_0>"):
        evaluate(model, text, 600, tokenizer=tokenizer)


def test_another_vocabulary_is_refused(mixtral, switch, text):
    with pytest.raises(ValueError, match="one is an encoder-decoder"):
        evaluate(mixtral, text, 600, reference=switch)


def test_vocabularies_are_compared_before_a_model_is_loaded(mixtral, text, tmp_path, monkeypatch):
    config = json.loads((mixtral / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 7}))
    monkeypatch.setattr("moepack.evaluation.models.open_with", lambda *_: pytest.fail("loaded"))
    with pytest.raises(
        moepack.ReferenceMismatchError, match=f"{tmp_path}: has a vocabulary of 7 tokens, but {mixtral}"
    ):
        evaluate(mixtral, text, 600, reference=tmp_path)


def test_the_report_as_json(mixtral, text):
    report = json.loads(json.dumps(evaluate(mixtral, text, 600).to_json()))
    assert set(report) == {"tokens", "loss", "perplexity", "seconds", "peak_memory"}


@given(st.integers(40, 600), st.integers(0, 1000))
def test_span_corruption_loses_nothing(length, seed):
    ids = np.arange(1000, 1000 + length)
    sentinels = list(range(100))
    source, target = span_corrupt(ids, sentinels, -1, np.random.default_rng(seed))
    assert source[-1] == target[-1] == -1
    kept, cut = split(source[:-1], sentinels), split(target[:-1], sentinels)
    assert sum(map(len, cut.values())) == int(length * 0.15)
    assert list(kept) == list(cut) == [None, *sentinels[: len(cut) - 1]]
    assert cut.pop(None) == []
    rebuilt = list(kept[None])
    for sentinel in cut:
        assert cut[sentinel]
        rebuilt += cut[sentinel] + kept[sentinel]
    assert rebuilt == ids.tolist()


def split(ids, sentinels):
    """sentinel -> the tokens after it, in order; None -> the tokens before the first sentinel."""
    parts = {None: []}
    for token in ids:
        if token in sentinels:
            parts[token] = []
        else:
            parts[list(parts)[-1]].append(token)
    return parts


def test_span_corruption_is_pinned():
    """The stored draws of numpy's generator: other windows would make figures incomparable."""
    source, target = span_corrupt(np.arange(100, 140), list(range(10)), 99, np.random.default_rng(0))
    assert source == [*range(100, 122), 0, *range(127, 139), 1, 99]
    assert target == [0, *range(122, 127), 1, 139, 99]

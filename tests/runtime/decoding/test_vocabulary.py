"""Tokens beyond the embedding are rejected at every entry point, with id, text and number of rows."""

import io
import shutil
from types import SimpleNamespace

import pytest
import torch
from tokenizers import AddedToken

import moepack
from moepack.calibration import Calibrator, decoder_samples
from moepack.checkpoint import Checkpoint, describe
from moepack.cli import main
from moepack.decoding.vocabulary import require_known, vocabulary_of, watch
from moepack.errors import CalibrationError, MoepackError, TokenError
from moepack.evaluation import evaluate, record_reference
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.serving.engine import Engine
from moepack.serving.text.conversation import Conversation
from moepack.serving.text.generation import generate
from moepack.serving.text.sampling import Sampling
from runtime_support import ARCHITECTURES, SWITCH, inputs, tiny_model
from tiny_models import VOCABULARY

EXTRA = "<|extra|>"
SAID = rf"token {VOCABULARY} is outside the model's vocabulary of {VOCABULARY} rows, '<\|extra\|>' in the tokenizer"
CHARS = 1600


def with_extra_token(source, directory):
    """A copy of a model whose tokenizer knows one token more than the embedding has rows."""
    shutil.copytree(source, directory)
    tokenizer = open_tokenizer(directory)
    tokenizer.add_tokens([AddedToken(EXTRA, special=True, normalized=False)])
    assert len(tokenizer) == VOCABULARY + 1
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def directory(packed, tmp_path_factory):
    return with_extra_token(packed, tmp_path_factory.mktemp("extra") / "packed")


@pytest.fixture(scope="module")
def source(mixtral, tmp_path_factory):
    return with_extra_token(mixtral, tmp_path_factory.mktemp("extra") / "source")


@pytest.fixture(scope="module")
def model(directory):
    return open_model(directory, "float32", mode="exact")


@pytest.fixture(scope="module")
def tokenizer(directory):
    return open_tokenizer(directory)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(f"the sea, {EXTRA} and the fire said nothing at all,\n" * 60)
    return file


def test_generate_and_chat(model, tokenizer):
    with pytest.raises(TokenError, match=SAID):
        generate(model, tokenizer, f"hi {EXTRA}")
    chat = Conversation(model, tokenizer, Sampling(max_new_tokens=2))
    with pytest.raises(TokenError, match=SAID):
        chat.answer(f"hi {EXTRA}", lambda piece: None)
    assert chat.messages == []
    chat.answer("hi", lambda piece: None)


@pytest.mark.parametrize("ids", [[5, VOCABULARY], [-1], [5, 1 << 70]])
def test_the_engine_takes_no_such_tokens(model, tokenizer, ids):
    engine = Engine(model, tokenizer)
    with pytest.raises(
        TokenError, match=f"token {min(ids) if min(ids) < 0 else max(ids)} is outside .* {VOCABULARY} rows"
    ):
        engine.submit(ids, Sampling(), lambda piece: None)
    assert engine.counts()["waiting"] == 0


def test_evaluation_and_references(directory, source, mixtral, text):
    for call in (
        lambda: evaluate(directory, text, CHARS),
        lambda: evaluate(directory, text, CHARS, mixtral),
        lambda: record_reference(source, text, CHARS),
        lambda: record_reference(source, text, CHARS, memory=0),
    ):
        with pytest.raises(TokenError, match=rf"text\.txt: {SAID}"):
            call()


def test_calibration(source, text, tmp_path):
    with pytest.raises(CalibrationError, match=rf"text\.txt: {SAID}"):
        moepack.compress(source, tmp_path / "out", method="codequant", calibration=str(text), samples=2)
    checkpoint = Checkpoint.open(source)
    with pytest.raises(TokenError, match=f"token {VOCABULARY} is outside"):
        Calibrator(checkpoint, describe(checkpoint), decoder_samples(torch.full((1, 4), VOCABULARY)))


def test_tasks(directory, tmp_path):
    pytest.importorskip("lm_eval.tasks")
    from moepack.evaluation.tasks import evaluate_tasks
    from task_support import TASK

    (tmp_path / "data.json").write_text(f'{{"question": "The {EXTRA}", "choices": ["a", "b"], "answer": 0}}\n')
    (tmp_path / "own.yaml").write_text(TASK.format(name="moepack_extra", file=tmp_path / "data.json"))
    with pytest.raises(TokenError, match=SAID):
        evaluate_tasks(directory, ["moepack_extra"], tmp_path)


@pytest.mark.parametrize("command", ["generate", "eval", "trace", "chat"])
def test_commands_say_it_in_a_line(directory, text, command, capsys, monkeypatch):
    options = {"generate": ["--prompt", f"hi {EXTRA}"], "chat": []}.get(command, ["--text", text])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"hi {EXTRA}\n".encode())))
    with pytest.raises(SystemExit) as end:
        main([command, str(directory), *map(str, options)])
    said = capsys.readouterr().err
    assert f"token {VOCABULARY} is out" in said and EXTRA in said and "Traceback" not in said
    assert end.value.code == (0 if command == "chat" else 1)  # a chat goes on


def test_a_prompt_file_with_one_is_named(directory, text, capsys):
    with pytest.raises(SystemExit):
        main(["generate", str(directory), "--prompt-file", str(text)])
    assert f"error: {text}: token {VOCABULARY} is out" in capsys.readouterr().err


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("token", [-1, 64])
def test_a_model_rejects_them_for_every_caller(architecture, token):
    model = tiny_model(architecture)
    watch(model)
    watch(model)
    assert len(model._forward_pre_hooks) == 1
    given = inputs(model, tokens=6)
    expected = model(**given).logits
    for name in given:
        changed = {key: ids.clone() for key, ids in given.items()}
        changed[name][-1, 2] = token
        with pytest.raises(TokenError, match=f"token {token} is outside the model's vocabulary of 64 rows"):
            model(**changed)
    if architecture == SWITCH:
        labels = given["labels"].clone()
        labels[0, 3:] = -100
        assert model(input_ids=given["input_ids"], labels=labels).loss.isfinite()
    torch.testing.assert_close(model(**given).logits, expected)


def test_models_are_watched_when_they_are_loaded(model, mixtral):
    from transformers import AutoModelForCausalLM

    for loaded in (model, open_model(mixtral), AutoModelForCausalLM.from_pretrained(model.config.name_or_path)):
        with pytest.raises(TokenError):
            loaded(torch.tensor([[1, VOCABULARY]]))


def test_missing_settings_of_a_model_are_not_checked():
    assert vocabulary_of(SimpleNamespace()) is None
    require_known([1 << 40], None)
    require_known([], 5)
    with pytest.raises(MoepackError, match="token 7 is outside the model's vocabulary of 5 rows: ids"):
        require_known([7], 5, SimpleNamespace(convert_ids_to_tokens=lambda token: [][token]))

"""The command `chat`: in a terminal, and from a script."""

import os
import pty
import re
import select
import shutil
import signal
import sys
import time
import warnings

import pytest
import torch
import transformers
from typer.testing import CliRunner

import moepack
from moepack.cli import app, main
from moepack.cli import chat as module
from moepack.decoding.finite import CHUNK, non_finite
from moepack.decoding.prefix import new_cache
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.serving.isolation import Part
from moepack.serving.step import Stepper
from moepack.serving.text.conversation import Conversation
from moepack.serving.text.generation import generate
from moepack.serving.text.sampling import Sampling
from tiny_models import TEMPLATE


@pytest.fixture(scope="module")
def source(packed, tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(packed, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
def chat(source):
    return Conversation(open_model(source), open_tokenizer(source), Sampling(max_new_tokens=6), "be kind")


@pytest.fixture
def talk():
    verbosity = transformers.logging.get_verbosity()
    yield lambda source, text, *options: CliRunner().invoke(
        app, ["chat", str(source), "--temperature", "0", *options], input=text
    )
    transformers.logging.set_verbosity(verbosity)


def test_a_conversation_keeps_its_messages(chat):
    pieces = []
    chat.answer("hello", pieces.append)
    chat.answer("and?", pieces.append)
    first, second = (message["content"] for message in chat.messages if message["role"] == "assistant")
    assert "".join(pieces) == first + second
    prompt = f"s:be kind\nu:hello\na:{first}\nu:and?\na:"
    assert second == generate(chat.model, chat.tokenizer, prompt, chat.sampling).text


def test_models_are_called_by_names_that_the_installed_transformers_does_not_deprecate(chat):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chat.answer("hello there", lambda text: None)
        chat.answer("and again", lambda text: None)
        cache = new_cache(chat.model)
        for position in range(2):
            (outcome,) = Stepper(chat.model).forward([Part([3], position, cache)])
            assert isinstance(outcome, torch.Tensor)
        assert "cannot be identified" in str(
            non_finite(chat.model, {"input_ids": torch.ones(1, CHUNK + 1, dtype=torch.long)})
        )


def test_a_stopped_answer_keeps_its_text(chat):
    def stop(piece):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.answer("hello", stop)
    whole = generate(chat.model, chat.tokenizer, "s:be kind\nu:hello\na:", chat.sampling).text
    assert chat.messages[-1]["role"] == "assistant"
    assert whole.startswith(chat.messages[-1]["content"]) and chat.messages[-1]["content"] != whole


def test_messages_that_the_template_rejects_are_dropped(chat):
    chat.tokenizer.chat_template = "{{ raise_exception('no system prompts') }}"
    with pytest.raises(ValueError, match="no system prompts"):
        chat.answer("hello", print)
    assert chat.messages == []


def test_the_oldest_turns_give_way(chat, monkeypatch):
    monkeypatch.setattr(chat.model.config, "max_position_embeddings", 60)
    chat.answer("x" * 20, print)
    with pytest.warns(moepack.MoepackWarning, match="oldest messages were dropped"):
        chat.answer("x" * 20, print)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]


def test_a_script_talks_in_lines_and_quotes(talk, source):
    result = talk(source, '/help\nhello\n/clear\n"""\none\ntwo\n"""\n/bye\nnever\n', "--max-new-tokens", "4")
    assert result.exit_code == 0, result.stderr
    assert "Answers are decoded by moepack's decoder." in result.stderr
    model, tokenizer = open_model(source), open_tokenizer(source)
    asked = [[{"role": "user", "content": text}] for text in ("hello", "one\ntwo")]
    answers = [generate(model, tokenizer, messages, Sampling(max_new_tokens=4)).text for messages in asked]
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)


def test_the_reason_is_given_if_the_core_does_not_decode(talk, source):
    result = talk(source, "hello\n", "--max-new-tokens", "4", "--dtype", "float16")
    assert "Answers are decoded by transformers (not supported by moepack's decoder: activations in torch.float16)" in (
        result.stderr
    )


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_an_encoder_decoder_is_refused_in_a_sentence(command, switch, capsys):
    if command == "serve":
        pytest.importorskip("fastapi")
    with pytest.raises(SystemExit, match="1"):
        main([command, str(switch)])
    assert "this model is an encoder-decoder" in capsys.readouterr().err


def test_models_without_a_template_continue_the_text(talk, packed):
    result = talk(packed, "The sea\n", "--max-new-tokens", "4")
    text = generate(open_model(packed), open_tokenizer(packed), "The sea", Sampling(max_new_tokens=4)).text
    assert (result.exit_code, result.stdout) == (0, f"{text}\n")
    assert "no chat template" in result.stderr
    refused = talk(packed, "", "--system", "be kind")
    assert refused.exit_code == 2 and "--system needs a model with a chat template" in refused.stderr


class Terminal:
    """A program in a separate terminal; killed at the end of the context if it runs then."""

    def __init__(self, command):
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "dumb"
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execv(command[0], command)
        self.seen = ""

    def wait(self, pattern, seconds=90):
        """Read until a pattern matches, and drop the text before it."""
        until = time.monotonic() + seconds
        while (found := re.search(pattern, self.seen)) is None:
            ready = select.select([self.file], [], [], max(until - time.monotonic(), 0))[0]
            assert ready, f"no {pattern!r} in {self.seen!r}"
            self.seen += os.read(self.file, 4096).decode(errors="replace")
        self.seen = self.seen[found.end() :]

    def type(self, text):
        os.write(self.file, text.encode())

    def ends_within(self, seconds):
        until = time.monotonic() + seconds
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            assert time.monotonic() < until, f"the program did not end: {self.seen}"
            time.sleep(0.05)
        self.pid = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.file)


def test_in_a_terminal_ctrl_c_stops_an_answer_and_lines_are_recalled(source, tmp_path):
    history = ["--history", str(tmp_path / "history")] if module.find_spec("prompt_toolkit") else []
    options = ["--max-new-tokens", "1900", "--temperature", "0", *history]
    command = [sys.executable, "-m", "moepack", "chat", str(source), *options]
    answer = generate(open_model(source), open_tokenizer(source), "u:hello\na:", Sampling(max_new_tokens=30)).text
    with Terminal(command) as terminal:
        terminal.wait(">>> ")
        terminal.type("hello\r")
        terminal.wait(re.escape(max(re.findall("[!-~]+", answer), key=len)))
        terminal.type("\x03")
        terminal.wait(r"\(stopped\)")
        terminal.wait(">>> ")
        terminal.type("/bye\r")
        terminal.ends_within(90)
    if history:
        assert "+hello" in (tmp_path / "history").read_text()

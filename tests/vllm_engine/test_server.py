"""vLLM's server with a packed directory, started by vLLM's command and by ours, and OpenAI's client."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.methods.finequant import FineQuant
from serving_support import templated
from vllm_support import PROMPTS, answers

openai = pytest.importorskip("openai")

KEY, NAME = "secret", "small"
ENDS_WITHIN = 60
"""Seconds in which a server ends after SIGTERM."""

COMMANDS = {
    "vLLM's command": (
        "vllm.entrypoints.openai.api_server", "--model", "{directory}", "--port", "{port}", "--api-key", KEY,
        "--served-model-name", NAME, "--max-model-len", "128", "--max-num-seqs", "4", "--dtype", "float32",
    ),
    "moepack serve": (
        "moepack", "serve", "{directory}", "--engine", "vllm", "--port", "{port}", "--api-key", KEY, "--name", NAME,
        "--context", "128", "--slots", "4", "--dtype", "float32",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        process: its process.
        client: a client of it.
        log: the file of its output.
    """

    process: subprocess.Popen[bytes]
    client: Any
    log: Path


@pytest.fixture(scope="module")
def directory(mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served")
    moepack.compress(mixtral, place / "packed", method=FineQuant(bits=8, dense_bits=8))
    return templated(place / "packed", place / "templated")


@pytest.fixture(scope="module", params=COMMANDS)
def server(
    request: pytest.FixtureRequest, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [part.format(directory=directory, port=port) for part in COMMANDS[request.param]]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", *command], stdout=output, stderr=output, env=environment())
    try:
        wait_for(process, f"http://127.0.0.1:{port}/health", log)
        yield Server(process, openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0), log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def environment() -> dict[str, str]:
    """The environment of a server: vLLM's default log level, and no compilation, which takes longer than the tests."""
    kept = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return kept | settings


def wait_for(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Wait until a server answers."""
    until = time.monotonic() + 300
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"the server does not answer:\n{log.read_text()[-4000:]}")


def test_a_completion_is_that_of_our_runtime(server: Server, directory: Path) -> None:
    [expected, *_] = answers(directory, PROMPTS[:1])
    done = server.client.completions.create(
        model=NAME, prompt=PROMPTS[0], max_tokens=len(expected.tokens), temperature=0, logprobs=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    assert done.choices[0].token_ids == expected.tokens
    assert done.usage.completion_tokens == len(expected.tokens)


def test_a_chat_is_streamed_as_it_is_written(server: Server) -> None:
    fields = {
        "model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = server.client.chat.completions.create(**fields)
    pieces = [chunk.choices[0] for chunk in server.client.chat.completions.create(**fields, stream=True)]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.choices[0].message.content != ""
    assert pieces[-1].finish_reason == whole.choices[0].finish_reason == "length"


def test_a_stop_string_ends_an_answer(server: Server) -> None:
    fields = {
        "model": NAME, "prompt": "She opened the door", "max_tokens": 16, "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    text = server.client.completions.create(**fields).choices[0].text
    stop = text[len(text) // 2]
    stopped = server.client.completions.create(**fields, stop=[stop]).choices[0]
    assert stopped.text == text[: text.index(stop)] and stopped.finish_reason == "stop"


def test_a_request_without_the_key_is_refused(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client.with_options(api_key="wrong").models.list()


def test_the_log_says_what_loads_the_model(server: Server, directory: Path) -> None:
    assert f"{directory} is packed: moepack loads it" in server.log.read_text()


def test_sigterm_ends_the_server(server: Server) -> None:
    """The last test of each server."""
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(ENDS_WITHIN) in (0, -signal.SIGTERM), server.log.read_text()[-2000:]

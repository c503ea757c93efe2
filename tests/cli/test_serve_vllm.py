"""`moepack serve --engine vllm` passes its options on to vLLM's server, or rejects them by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from command_support import run
from moepack.cli import vllm


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of the servers that are started, instead of a start."""
    calls: list[list[str]] = []
    monkeypatch.setattr(vllm, "find_spec", lambda name: name)
    monkeypatch.setattr(vllm, "run_instead", lambda command: calls.append(command[3:]))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return calls


def test_options_are_passed_on(
    started: list[list[str]], packed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm.os, "environ", environment := dict[str, Any]())
    options = ["--port", 9, "--name", "small", "--slots", 4, "--context", 99, "--api-key", "secret", "--top-k", 7]
    run(capsys, "serve", packed, "--engine", "vllm", *options, "--cors-origin", "*")
    [arguments] = started
    found = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert json.loads(found.pop("--override-generation-config")) == {"top_k": 7}
    assert found == {
        "--model": str(packed), "--host": "127.0.0.1", "--port": "9", "--served-model-name": "small",
        "--max-num-seqs": "4", "--max-model-len": "99", "--dtype": "auto", "--allowed-origins": '["*"]',
    }  # fmt: skip
    assert environment["VLLM_API_KEY"] == "secret"


@pytest.mark.parametrize("option", [["--queue", 3], ["--deterministic"], ["--host-memory", "1GB"], ["--print-unit"]])
def test_options_that_vllm_lacks_are_rejected_by_name(
    started: list[list[str]], packed: Path, capsys: pytest.CaptureFixture[str], option: list[Any]
) -> None:
    code, _, error = run(capsys, "serve", packed, "--engine", "vllm", *option)
    assert code == 2 and f"vLLM has no option like {option[0]}" in error and not started


def test_a_missing_vllm_is_named(
    packed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    code, _, error = run(capsys, "serve", packed, "--engine", "vllm")
    assert code and "vLLM is not installed: pip install 'moepack[vllm]'" in error

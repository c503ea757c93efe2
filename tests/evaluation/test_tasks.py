"""`moepack eval --tasks`: lm-eval on a packed model, with a custom task, offline."""

import json
import os
from functools import partial

import pytest
import torch
import transformers
from typer.testing import CliRunner

from moepack.cli import app
from moepack.integrations.loading import open_model, open_tokenizer
from task_support import TASK

harness = pytest.importorskip("lm_eval.tasks")

QUESTIONS = [("The sea is", ["wide", "a wolf"], 0), ("A wolf", ["sings", "runs"], 1), ("Fire", ["burns", "x"], 0)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    documents = [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS]
    (folder / "data.json").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (folder / "own.yaml").write_text(TASK.format(name="moepack_own", file=folder / "data.json"))
    return folder


def run(*arguments):
    verbosity = transformers.logging.get_verbosity()
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    transformers.logging.set_verbosity(verbosity)
    return result


def accuracy(directory):
    """The share of questions whose right answer is most likely, computed directly."""
    model, tokenizer = open_model(directory, "float32"), open_tokenizer(directory)

    def score(question, choice):
        prompt, answer = (tokenizer(text).input_ids for text in (question, f" {choice}"))
        with torch.inference_mode():
            log = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        return sum(float(log[len(prompt) - 1 + i, token]) for i, token in enumerate(answer))

    right = [max(range(len(c)), key=lambda i: score(q, c[i])) == a for q, c, a in QUESTIONS]
    return sum(right) / len(right)


def test_a_task_of_one_s_own_on_a_packed_model(packed, tasks, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\necho fatal: not a git repository >&2\nexit 128\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    result = run(packed, "--tasks", "moepack_own", "--task-path", tasks, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.splitlines()[-1])
    assert printed["model"] == str(packed)
    assert printed["results"]["moepack_own"]["acc"] == pytest.approx(accuracy(packed))
    assert "not a git repository" not in result.stderr + capfd.readouterr().err


def test_unknown_tasks_and_both_ways_are_wrong_usage(packed, tasks, monkeypatch):
    without_its_own = partial(harness.TaskManager, include_defaults=False)  # thousands, which take seconds to read
    monkeypatch.setattr(harness, "TaskManager", without_its_own)
    result = run(packed, "--tasks", "no_such_task", "--task-path", tasks)
    assert result.exit_code == 2 and "there is no task 'no_such_task'" in result.stderr
    assert run(packed).exit_code == 2
    assert run(packed, "--tasks", "x", "--text", __file__).exit_code == 2

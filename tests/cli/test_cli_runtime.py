"""The commands `eval`, `generate` and `doctor`, on packed and plain tiny models."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from typer.testing import CliRunner

import moepack
from moepack.cli import app, main
from moepack.decoding.families import FAMILIES
from moepack.evaluation import evaluate
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.methods.qmoe.ternary import Ternary
from moepack.serving.text.generation import generate
from moepack.serving.text.sampling import Sampling


@pytest.fixture
def run(monkeypatch):
    """Run a command and restore transformers' verbosity, which commands lower."""
    verbosity = transformers.logging.get_verbosity()
    yield lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture(scope="module")
def packed(mixtral, tmp_path_factory):
    directory = tmp_path_factory.mktemp("cli") / "packed"
    moepack.compress(mixtral, directory, method=Ternary())
    return directory


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the sea and the wolf and the fire said " * 40, encoding="utf-8")
    return file


def test_eval_json_equals_evaluate(run, packed, mixtral, text):
    result = run("eval", packed, "--text", text, "--reference", mixtral, "--chars", 600, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    expected = evaluate(packed, text, 600, reference=mixtral).to_json()
    assert printed.pop("model") == str(packed)
    assert printed.pop("text") == str(text)
    assert printed.pop("seconds") > 0 and printed.pop("peak_memory") > 0
    del expected["seconds"], expected["peak_memory"]
    assert printed == pytest.approx(expected, rel=1e-5)


def test_eval_saves_and_reuses_a_reference(run, packed, mixtral, text, tmp_path):
    reference, options = tmp_path / "reference", ["--text", text, "--chars", 600, "--json"]
    first = run("eval", packed, *options, "--reference", mixtral, "--save-reference", reference)
    again = run("eval", packed, *options, "--reference", reference)
    assert first.exit_code == again.exit_code == 0
    assert json.loads(first.stdout)["kl"] == json.loads(again.stdout)["kl"] > 0
    other = run("eval", packed, "--text", text, "--chars", 1200, "--reference", reference)
    assert isinstance(other.exception, moepack.ReferenceMismatchError) and str(reference) in str(other.exception)
    assert run("eval", packed, *options, "--save-reference", reference).exit_code == 2
    assert run("eval", packed, *options, "--shots", 2).exit_code == 2
    assert run("eval", packed, "--tasks", "arc_easy", "--reference", mixtral).exit_code == 2


def test_eval_table(run, mixtral, text):
    result = run("eval", mixtral, "--text", text, "--chars", 600)
    assert result.exit_code == 0, result.output
    assert f"{evaluate(mixtral, text, 600).perplexity:.4f}" in result.stdout
    assert "KL" not in result.stdout


@pytest.mark.parametrize("arguments", [["--chars", 0], ["--chars", 100], ["--dtype", "int3"], ["--threads", 0]])
def test_eval_usage_errors(run, mixtral, text, arguments):
    assert run("eval", mixtral, "--text", text, *arguments).exit_code == 2


def test_eval_names_an_invalid_text(run, mixtral, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    result = run("eval", mixtral, "--text", tmp_path / "binary")
    assert result.exit_code == 2 and "UTF-8" in result.output


@pytest.mark.parametrize("lost", ["weights", "tokenizer"])
def test_a_model_without_weights_or_tokenizer_is_a_foreseen_failure(run, mixtral, tmp_path, lost):
    shutil.copytree(mixtral, tmp_path / "model")
    for file in (tmp_path / "model").iterdir():
        if file.name != "config.json" and (lost == "weights") == (file.suffix == ".safetensors"):
            file.unlink()
    result = run("generate", tmp_path / "model", "--prompt", "a")
    assert isinstance(result.exception, moepack.LoadError), result.exception
    assert str(tmp_path / "model") in str(result.exception) and "\n" not in str(result.exception)


def test_eval_without_a_text(run, mixtral, tmp_path):
    assert run("eval", mixtral, "--text", tmp_path / "nothing.txt").exit_code == 2


@pytest.mark.parametrize("command", [["eval", "--text"], ["generate", "--prompt"]])
def test_no_model_is_a_foreseen_failure(run, tmp_path, text, command):
    result = run(command[0], tmp_path / "nowhere", command[1], text)
    assert isinstance(result.exception, moepack.LoadError)
    assert "nowhere/config.json" in str(result.exception)


def test_generate_prints_prompt_text_and_speed(run, packed):
    result = run("generate", packed, "--prompt", "The sea", "--max-new-tokens", 12, "--threads", 2)
    assert result.exit_code == 0, result.output
    report = generate(open_model(packed), open_tokenizer(packed), "The sea", Sampling(max_new_tokens=12))
    assert result.stdout == f"The sea{report.text}\n"
    assert "12 tokens" in result.stderr
    for part in ("tokens/s", "first token after", "peak memory"):
        assert part in result.stderr


@pytest.mark.parametrize("command", [["generate", "--prompt", "The sea"], ["eval", "--text", "TEXT"]])
def test_a_gpu_that_disappears_is_a_foreseen_failure(monkeypatch, capsys, packed, text, command):
    def forward(*_, **__):
        raise torch.AcceleratorError(
            "CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later"
        )

    monkeypatch.setattr(transformers.MixtralForCausalLM, "forward", forward)
    name, *rest = command
    with pytest.raises(SystemExit) as exit_:
        main([name, str(packed), *(str(text) if word == "TEXT" else word for word in rest)])
    said = capsys.readouterr().err
    assert exit_.value.code == 1
    assert "error: a GPU failed during use (CUDA error: unspecified launch failure); its contents are" in said


@pytest.mark.parametrize("command", ["trace", "compare", "chat"])
def test_a_place_that_cannot_be_written_to_is_found_before_the_work(run, packed, mixtral, text, tmp_path, command):
    file = tmp_path / "no" / "file"
    result = run(*{
        "trace": ("trace", packed, "--text", text, "--out", file),
        "compare": ("compare", mixtral, "--text", text, "--chart", file),
        "chat": ("chat", packed, "--history", file),
    }[command])  # fmt: skip
    assert result.exit_code == 2 and result.stdout == "" and f"there is no folder {tmp_path / 'no'}" in result.stderr


def test_errors_of_the_system_are_one_line_that_names_the_file(packed, text, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["trace", str(packed), "--text", str(text), "--chars", "600", "--out", str(tmp_path)])
    assert end.value.code == 1 and f"error: {tmp_path}: Is a directory" in capsys.readouterr().err


def test_other_runtime_errors_are_no_failures_of_a_gpu(monkeypatch, packed):
    def forward(*_, **__):
        raise RuntimeError("something else")

    monkeypatch.setattr(transformers.MixtralForCausalLM, "forward", forward)
    with pytest.raises(RuntimeError, match="something else"):
        main(["generate", str(packed), "--prompt", "The sea"])


def test_damaged_tokenizers_are_a_foreseen_failure(run, packed, tmp_path):
    """They raise KeyError, TypeError and AttributeError in transformers and tokenizers."""
    for number, (name, content) in enumerate(
        [("tokenizer.json", "{}"), ("tokenizer.json", "[1, 2]"), ("tokenizer_config.json", "[]")]
    ):
        directory = shutil.copytree(packed, tmp_path / str(number))
        (directory / name).write_text(content)
        done = run("generate", str(directory), "--prompt", "a")
        assert done.exit_code == 1 and f"{directory}: no tokenizer can be loaded: " in str(done.exception), done


@pytest.mark.parametrize("content", ["[1]", "{"])
def test_a_damaged_generation_config_is_named(run, packed, tmp_path, content):
    directory = shutil.copytree(packed, tmp_path / "packed")
    (directory / "generation_config.json").write_text(content)
    done = run("generate", str(directory), "--prompt", "a")
    assert done.exit_code == 1 and str(done.exception).startswith(f"{directory}/generation_config.json: "), done


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64])
def test_a_seed_has_64_bits(run, packed, seed):
    done = run("generate", str(packed), "--prompt", "a", "--seed", str(seed))
    assert done.exit_code == 2 and "seed must be an integer of 64 bits" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "packed", "--reference", "x"], "--reference needs --text"),
        (["compress", "packed", "out", "--bits", "x"], "--method auto takes --bits only as PATTERN=BITS"),
    ],
)
def test_options_without_effect_are_wrong_usage(run, arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2 and message in done.stderr, done.stderr


def test_a_trace_that_does_not_exist_is_named(run, tmp_path):
    done = run("trace", str(tmp_path / "absent.npz"))
    assert done.exit_code == 1 and str(done.exception) == f"{tmp_path}/absent.npz: no such file"


@pytest.mark.parametrize(
    ("arguments", "closed", "code", "error"),
    [
        (["generate", "DIR", "--prompt", "-"], "<&-", 2, "the prompt has no tokens"),
        (["generate", "DIR", "--prompt", "a"], ">&-", 0, "tokens/s"),
        (["chat", "DIR"], "<&-", 0, ""),
        (["generate", "DIR", "--prompt", "a"], "2>&-", 0, ""),
    ],
)
def test_streams_may_be_closed(packed, arguments, closed, code, error):
    command = [sys.executable, "-m", "moepack", *arguments]
    line = " ".join([*command, closed]).replace("DIR", str(packed))
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=100)
    assert done.returncode == code and error in done.stderr and "Traceback" not in done.stderr, done


def test_generate_resident_writes_the_same_text(run, packed):
    arguments = "generate", packed, "--prompt", "The sea", "--max-new-tokens", 6
    mapped, resident = run(*arguments), run(*arguments, "--resident")
    assert resident.exit_code == 0, resident.output
    assert resident.stdout == mapped.stdout


def test_generate_with_switch_shows_sentinels_and_no_prompt(run, switch):
    result = run("generate", switch, "--prompt", "The <extra_id_0> sea", "--max-new-tokens", 5)
    assert result.exit_code == 0, result.output
    assert "The" not in result.stdout


def test_the_decoder_is_reported(run, packed, mixtral, monkeypatch):
    asked = "--prompt", "The sea", "--max-new-tokens", 4
    assert "decoded by moepack's decoder\n" in run("generate", packed, *asked).stderr
    assert "decoded by transformers (moepack's decoder needs a packed model" in run("generate", mixtral, *asked).stderr
    monkeypatch.setenv("MOEPACK_DECODE", "transformers")
    declined = "decoded by transformers (not supported by moepack's decoder: steps while"
    assert declined in run("generate", packed, *asked).stderr


def test_doctor(run, monkeypatch, tmp_path):
    monkeypatch.setattr("moepack.backends.speeds.SHAPE", (128, 256))  # instead of 33 million weights
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["versions"]["torch"]
    assert facts["processor"]["instruction set used"] in facts["processor"]["instruction sets found"]
    assert facts["kernels"]
    assert facts["decoding"] == {"by moepack's decoder": ", ".join(FAMILIES)}
    assert facts["memory"]["read bandwidth GB/s"] > 0.1
    table = run("doctor")
    assert table.exit_code == 0
    for word in ("instruction set used", "transparent huge pages", "read bandwidth", *facts["kernels"]):
        assert word in table.stdout


@pytest.mark.parametrize(("given", "kept"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_commands_let_idle_threads_sleep_by_default(monkeypatch, given, kept):
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY") if given is None else monkeypatch.setenv("OMP_WAIT_POLICY", given)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert os.environ["OMP_WAIT_POLICY"] == kept


def test_the_command_line_starts_without_torch():
    code = "import sys, moepack.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_an_encoding_that_lacks_characters_is_no_error() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "moepack", "compress", "--help"]
    found = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120)
    assert b"--bits-per-weight" in found.stdout and found.stdout.isascii()

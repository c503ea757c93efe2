"""The commands compress, inspect and verify, and guarantees of the command line for all commands."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import moepack
import packed_support as support
from command_support import run
from fork_support import run_script
from moepack.cli import COMMANDS, app, main
from moepack.format import MANIFEST, PackedDirectory
from moepack.units import size, speed


def test_compress_inspect_verify(mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    code, text, progress = run(capsys, "compress", mixtral, out, "--method", "finequant", "--threads", 1)
    assert code == 0 and "bits per weight" in text and str(out) in text
    assert "model.layers.1.mlp.experts" in progress and "manifest" in progress
    code, text, _ = run(capsys, "inspect", out)
    assert code == 0
    for expected in ("model.layers.0.mlp.experts", "gate_proj", "int4 group 64", "4 x 96 x 64", "all experts", "kB"):
        assert expected in text
    code, text, _ = run(capsys, "verify", out)
    assert code == 0 and "is sound" in text


def test_inspect_json_agrees_with_the_files(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "inspect", packed, "--json")
    content = json.loads(text)
    assert code == 0
    directory = PackedDirectory.open(packed)
    assert content["totals"]["directory"]["after"] == sum(map(len, support.contents(packed).values()))
    assert content["totals"]["experts"]["after"] == sum(array.nbytes for array in directory.tensors().values())
    assert [row["projection"] for row in content["tensors"]] == ["gate_proj", "up_proj", "down_proj"] * 2
    row = content["tensors"][0]
    codes = directory.blob("model.layers.0.mlp.experts.gate_proj").decode()
    assert row["zeros"] == pytest.approx((codes == 0).mean())
    assert row["bits_per_weight"] == pytest.approx(8 * row["after"] / codes.size)
    assert row["before"] == 2 * codes.size


def test_verify_says_where(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    file = copy / "model-00002-of-00003.safetensors"
    support.flip(file, 8 * file.stat().st_size - 8 * 5000)
    code, text, _ = run(capsys, "verify", copy)
    assert code == 1
    first = text.splitlines()[0]
    assert file.name in first and "model.layers.1.mlp.experts." in first
    code, text, _ = run(capsys, "verify", copy, "--json")
    report = json.loads(text)
    assert code == 1 and report["ok"] is False
    assert report["faults"][0]["file"] == file.name and report["faults"][0]["offset"] % 64 == 0


def test_verify_lists_side_files_apart(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    (copy / "README.md").write_text("# a model card")
    code, text, _ = run(capsys, "verify", copy)
    assert code == 0 and "README.md (added)" in text and "is sound" in text
    code, text, _ = run(capsys, "verify", copy, "--strict", "--json")
    assert code == 1 and json.loads(text)["ok"] is True
    assert json.loads(text)["side"] == [{"file": "README.md", "change": "added"}]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_failures_are_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(capsys, command, tmp_path / "absent")
    assert code == 1 and out == ""
    assert error == f"error: {tmp_path / 'absent'}: no such directory\n"


def test_compress_failures(mixtral: Path, packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "compress", mixtral, packed)
    assert code == 1 and error.startswith(f"error: {packed}: exists") and error.count("\n") == 1
    code, _, error = run(capsys, "compress", tmp_path / "absent", tmp_path / "out")
    assert code == 1 and error.startswith("error: ") and error.count("\n") == 1
    code, _, error = run(capsys, "compress", mixtral, tmp_path / "out", "--method", "milo", "--solver", "guess")
    assert code == 2 and "lsq, hqq or rtn" in error
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(moepack.LoadError):
        main(["--debug", "verify", str(tmp_path / "absent")])


def test_a_newer_directory_is_refused_in_one_line(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    support.rewrite_manifest(copy, lambda content: content.update(version=2))
    code, _, error = run(capsys, "inspect", copy)
    assert code == 1 and "version 2" in error and "up to 1" in error and MANIFEST in error


def test_ctrl_c_before_anything_is_written_promises_nothing(
    mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moepack.pipeline.compress", interrupt)
    arguments = mixtral, tmp_path / "out", "--method", "finequant", "--calibration", "none"
    code, _, error = run(capsys, "compress", *arguments)
    assert code == 130 and "nothing was written" in error and "continues" not in error


def test_ctrl_c_that_a_library_replaces_still_exits_130(
    mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(*arguments: Any, **options: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise RuntimeError("Error calling __set_name__") from interrupt

    monkeypatch.setattr("moepack.pipeline.compress", replace)
    arguments = mixtral, tmp_path / "out", "--method", "finequant", "--calibration", "none"
    code, _, error = run(capsys, "compress", *arguments)
    assert code == 130 and "Traceback" not in error


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
@pytest.mark.parametrize("command", ["compress", "tune"])
def test_a_device_that_is_not_there_is_wrong_usage(
    command: str, device: str, mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [mixtral, tmp_path / "out"] if command == "compress" else [mixtral, mixtral, tmp_path / "out"]
    code, _, error = run(capsys, command, *paths, "--calibration", "text", "--device", device)
    assert code == 2 and f"'{device}' cannot be used here" in error


def test_ctrl_c_exits_130_and_the_same_command_continues(mixtral: Path, packed: Path, tmp_path: Path) -> None:
    """A real signal, sent at the start of the second layer."""
    interrupted, again = tmp_path / "interrupted.py", tmp_path / "again.py"
    interrupted.write_text(
        "import os, signal\n"
        "from moepack.cli import main\n"
        "from moepack.progress import Lines\n"
        "stage = Lines.stage\n"
        "def interrupting(self, name):\n"
        "    stage(self, name)\n"
        "    if 'layers.1' in name:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "Lines.stage = interrupting\n"
        "main()\n"
    )
    again.write_text("from moepack.cli import main\nmain()\n")
    out = tmp_path / "out"
    command = ["compress", mixtral, out, "--method", "finequant", "--calibration", "none"]
    done = run_script(interrupted, *command, folder=tmp_path)
    assert done.returncode == 130, done.stderr
    assert f"interrupted; the same command continues from {out}.partial" in done.stderr
    assert "Traceback" not in done.stderr and not out.exists()
    done = run_script(again, *command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    before = signal.getsignal(signal.SIGINT)
    moepack.compress(mixtral, tmp_path / "whole", method="finequant")
    assert support.contents(out) == support.contents(tmp_path / "whole")
    assert signal.getsignal(signal.SIGINT) is before


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "--help")
    assert code == 0
    for command in COMMANDS:
        assert command in text


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[:2] == (0, f"moepack {moepack.__version__}\n")


def test_shells_complete_commands() -> None:
    asked = {"_MOEPACK_COMPLETE": "complete_bash", "COMP_WORDS": "moepack ser", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, [], prog_name="moepack", env=asked).stdout.split() == ["serve"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1_500_000, "1.5 MB"),
        (999_600, "1 MB"),
        (2.5e9, "2.5 GB"),
        (3e12, "3 TB"),
    ],
)
def test_sizes_are_readable(count: float, text: str) -> None:
    assert size(count) == text


def test_speeds_are_readable() -> None:
    assert speed(12) == "12 weights/s"
    assert speed(2.5e8) == "250M weights/s"
    assert speed(4e9) == "4G weights/s"

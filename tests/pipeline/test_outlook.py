"""Plans of sizes and machines, and the library of packed models."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

import moepack
import moepack.cli
import packed_support as support
from hub_support import serving, use
from moepack.methods import create
from moepack.pipeline.costs import PROCESS
from moepack.pipeline.estimate import estimate
from moepack.pipeline.library import entries, place_of, title_of
from moepack.pipeline.machines import DRIVE, GPU, GPU_AND_MEMORY, GPU_PROCESS, MEMORY, Machine
from moepack.pipeline.outlook import outlook

NAME = "someone/moe"
GB = 10**9


def test_a_machine_is_described_in_words() -> None:
    assert Machine.described("RAM=32GB,GPU=12GB,NVMe") == Machine(32 * GB, 12 * GB, None, True, False)
    assert Machine.described(" ram = 16GiB , nvme=1TB") == Machine(16 << 30, None, 10**12, True, False)
    assert Machine.described("RAM=8GB") == Machine(8 * GB, None, None, False, False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "RAM, GPU and NVMe"),
        ("32GB", "'32GB': a machine has RAM, GPU and NVMe"),
        ("GPU=12GB", "has no RAM"),
        ("RAM", "RAM needs a size"),
        ("RAM=much", "RAM: 'much' is not a size"),
        ("RAM=1GB,ram=2GB", "given twice"),
        ("RAM=1GB,SSD", "'SSD': a machine has"),
        ("RAM=1GB,", "RAM, GPU and NVMe"),
        ("RAM=0GB", "RAM: '0GB' is not a size"),
    ],
)
def test_wrong_descriptions_are_named(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as caught:
        Machine.described(text)
    assert "RAM=32GB,GPU=12GB,NVMe" in str(caught.value) or "is not a size" in str(caught.value)


@pytest.mark.parametrize(
    ("machine", "weights", "expected"),
    [
        ("RAM=32GB", 16, (MEMORY,)),
        ("RAM=32GB", 40, ()),
        ("RAM=32GB,NVMe", 88, (DRIVE,)),
        ("RAM=32GB,NVMe=50GB", 88, ()),
        ("RAM=32GB,GPU=24GB", 16, (GPU, MEMORY)),
        ("RAM=8GB,GPU=24GB", 16, (GPU,)),
        ("RAM=32GB,GPU=24GB", 50, (GPU_AND_MEMORY,)),
        ("RAM=32GB,GPU=24GB,NVMe", 88, (DRIVE,)),
        ("RAM=2GB,NVMe", 88, ()),
    ],
)
def test_places_of_weights(machine: str, weights: int, expected: tuple[str, ...]) -> None:
    """A tenth of the weights are not experts, so they cannot stay on the drive."""
    found = Machine.described(machine).places(weights * GB, int(0.9 * weights * GB), PROCESS)
    assert found == expected


@given(some.integers(1, 10**12), some.floats(0, 1), some.integers(0, 10**12), some.integers(0, 10**12), some.booleans())
def test_more_memory_never_loses_a_model(weights: int, share: float, ram: int, gpu: int, drive: bool) -> None:
    streamed = int(share * weights)
    small, large = Machine(ram, gpu, None, drive, False), Machine(2 * ram, 2 * gpu, None, drive, False)
    if small.places(weights, streamed, PROCESS):
        assert large.places(weights, streamed, PROCESS)
    if GPU in small.places(weights, streamed, PROCESS):
        assert weights + GPU_PROCESS <= gpu


def test_sizes_of_a_model_on_the_hub(qwen3_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({NAME: qwen3_moe}) as hub:
        use(hub, tmp_path, monkeypatch)
        found = outlook(NAME, machine=Machine.described("RAM=32GB"))
        size = found.choices[-1].nbytes
        plan = estimate(NAME, tmp_path / "out", create("auto", size=size))
        assert not [each for each in hub.shards() if each.start is None]
    local = outlook(qwen3_moe, machine=Machine.described("RAM=32GB"))
    assert found.streaming is not None and local.streaming is None
    assert found.choices == local.choices and found.parts == local.parts and found.weights == local.weights
    assert [round(choice.bits) for choice in found.choices] == sorted({round(each.bits) for each in found.choices})
    assert all(choice.loss is None and choice.places == (MEMORY,) for choice in found.choices)
    assert found.best == found.choices[-1]
    assert plan.plan is None and abs(plan.after - size) < 0.2 * size
    assert plan.goal is not None and plan.goal.nbytes == size


def test_sizes_may_be_requested(qwen3_moe: Path) -> None:
    found = outlook(qwen3_moe, ["250kB", "150kB"], Machine.described("RAM=1GB"))
    assert [choice.nbytes for choice in found.choices] == [150_000, 250_000]
    with pytest.raises(ValueError, match="needs at least"):
        outlook(qwen3_moe, ["1kB"])
    with pytest.raises(ValueError, match="already take only"):
        outlook(qwen3_moe, ["1GB"])


def test_the_loss_is_shown_if_the_sensitivity_is_known(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine.described("RAM=32GB")
    assert outlook(mixtral, ["200kB"], machine, loss=True).choices[0].loss is None
    plan = estimate(mixtral, tmp_path / "out", create("auto", size="200kB")).plan
    assert plan is not None and plan.loss is not None
    assert outlook(mixtral, ["200kB"], machine, loss=True).choices[0].loss == plan.loss
    assert outlook(mixtral, ["200kB"], machine).choices[0].loss is None, "weights are read on request only"


def test_the_library_lists_and_removes(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert entries() == [] and title_of("someone/moe@v1") == "someone/moe@v1"
    place = place_of("someone/moe", "9GB")
    place.parent.mkdir(parents=True)
    moepack.compress(mixtral, place, method="finequant")
    (place_of("someone/other", "5GB").with_suffix(".partial")).mkdir()
    first, second = entries()
    assert (first.title, first.size, first.complete) == ("someone/moe", "9GB", True) and first.nbytes > 10_000
    assert (second.title, second.size, second.complete) == ("someone/other", "5GB", False)
    assert entries("someone/moe") == [first]
    with pytest.raises(SystemExit):
        moepack.cli.main(["list"])
    shown = capsys.readouterr().out
    assert "someone/moe  9GB" in shown and "unfinished" in shown.splitlines()[1]
    with pytest.raises(SystemExit):
        moepack.cli.main(["list", "--json"])
    assert [entry["complete"] for entry in json.loads(capsys.readouterr().out)] == [True, False]
    with pytest.raises(SystemExit) as left:
        moepack.cli.main(["remove", "someone/absent", "--yes"])
    assert left.value.code == 2 and "someone/moe (9GB)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        moepack.cli.main(["remove", "someone/moe", "--yes"])
    assert not place.exists() and [entry.title for entry in entries()] == ["someone/other"]


def test_run_packs_once_and_starts_a_chat(
    qwen3_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("os.execv", lambda _, command: started.append(command))
    with serving({NAME: qwen3_moe}) as hub:
        use(hub, tmp_path, monkeypatch)
        for arguments in (["--yes", "--size", "250kB", "--calibration", "none"], [], ["--serve", "--port", "0"]):
            with pytest.raises(SystemExit) as left:
                moepack.cli.main(["run", NAME, *arguments])
            assert left.value.code == 0
        count = len(hub.requests)
        place = str(place_of(NAME, "250kB"))
        with pytest.raises(SystemExit):
            moepack.cli.main(["run", place])
        assert len(hub.requests) == count, "a packed directory is not packed"
    assert [command[3:5] for command in started] == [
        ["chat", place],
        ["chat", place],
        ["serve", place],
        ["chat", place],
    ]
    assert not list(Path(place).parent.glob("*.source")) and "runs from" in capsys.readouterr().out


def test_run_packs_a_file_of_weights_with_the_configuration_of_a_folder(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("os.execv", lambda _, command: started.append(command))
    (weights := tmp_path / "weights").mkdir()
    shutil.copy(mixtral / "model.safetensors", weights / "moe.safetensors")
    options = ["--config", str(mixtral), "--yes", "--size", "200kB", "--calibration", "none", "--quiet"]
    with pytest.raises(SystemExit) as left:
        moepack.cli.main(["run", str(weights / "moe.safetensors"), *options])
    assert left.value.code == 0 and started[0][3] == "chat"
    assert moepack.verify(started[0][4])


def test_run_starts_a_packed_model_of_the_hub(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, command: started.append(command))
    with serving({NAME: packed}) as hub:
        use(hub, tmp_path, monkeypatch)
        with pytest.raises(SystemExit) as left:
            moepack.cli.main(["run", NAME])
    assert left.value.code == 0 and started[0][3] == "chat"
    assert support.contents(Path(started[0][4])) == support.contents(packed)


def test_run_asks_before_it_packs(
    qwen3_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with pytest.raises(SystemExit) as left:
        moepack.cli.main(["run", str(qwen3_moe)])
    assert left.value.code == 2 and "--yes" in capsys.readouterr().err
    assert not entries()


def test_the_command_plan_prints_a_table_or_json(qwen3_moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        moepack.cli.main(["plan", str(qwen3_moe), "--for", "RAM=32GB,GPU=12GB", "--size", "250kB"])
    shown = capsys.readouterr().out
    assert "32 GB of memory, a GPU with 12 GB" in shown and "GPU, memory" in shown and "--size 250kB" in shown
    with pytest.raises(SystemExit):
        moepack.cli.main(["plan", str(qwen3_moe), "--json"])
    assert json.loads(capsys.readouterr().out)["layers"] == 2
    with pytest.raises(SystemExit) as left:
        moepack.cli.main(["plan", str(qwen3_moe), "--for", "lots"])
    assert left.value.code == 2 and "RAM=32GB" in capsys.readouterr().err

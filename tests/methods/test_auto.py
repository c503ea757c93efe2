"""The method `auto`: meets a size, rejects unreachable sizes before reading weights, and allocates by importance."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import moepack
import packed_support as support
from command_support import run
from moepack.backends.speeds import Speeds
from moepack.backends.targets import speeds_of
from moepack.calibration.fisher import fisher
from moepack.checkpoint import Checkpoint, describe
from moepack.errors import CalibrationError, DiskError, ResumeError
from moepack.format import PackedDirectory
from moepack.methods import Auto, Rate
from moepack.methods.auto.coded import Coded, _held
from moepack.methods.auto.mixed import Mixed
from moepack.methods.auto.target import Target
from moepack.methods.rate.importance import find_balances
from moepack.methods.rate.scales import Scales
from moepack.methods.reads import reads_by_tensor
from moepack.pipeline.estimate import estimate
from moepack.units import byte_count
from places import NOVEL, TINY_MOE


def weight_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def calibrated(**settings: Any) -> Auto:
    return Auto(calibration=str(NOVEL), samples=6, sequence_length=64, **settings)


# ---- sizes

SPELLINGS = [("5MB", 5_000_000), ("5 MiB", 5 << 20), ("5e6", 5_000_000), (5_000_000, 5_000_000), ("0.5GB", 500_000_000)]


@pytest.mark.parametrize(("text", "count"), SPELLINGS)
def test_sizes_are_read_as_people_write_them(text: str | int, count: int) -> None:
    assert byte_count(text) == count
    Target(size=text)


NO_SIZES = [
    *({"size": size} for size in ("-5MB", "much", "nan", "infGB", 0)),
    *({"ratio": ratio} for ratio in (0.0, 1.5, math.nan)),
    {"bits_per_weight": -1.0},
    {"ratio": 0.5, "size": "1MB"},
    {"prefer": "beauty"},
]


@pytest.mark.parametrize("settings", NO_SIZES)
def test_invalid_sizes_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Auto(**settings)


IMPOSSIBLE = [
    ({"size": "100kB"}, "needs at least"),
    ({"size": "10MB"}, "already take only"),
    ({"size": "100kB", "prefer": "speed"}, "needs at least"),
]


@pytest.mark.parametrize(("settings", "message"), IMPOSSIBLE)
def test_impossible_sizes_are_refused_before_a_weight_is_read(
    settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Checkpoint, "tensor", read)
    for refused in (estimate, moepack.compress):
        with pytest.raises(ValueError, match=message):
            refused(TINY_MOE, tmp_path / "out", method=Auto(**settings))
    assert list(tmp_path.iterdir()) == []


def test_the_least_size_can_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "compress", TINY_MOE, tmp_path / "out", "--size", "1kB")
    assert code == 2 and error.count("\n") == 1
    least = byte_count(error.split(" at least ")[-1].strip())
    moepack.compress(TINY_MOE, tmp_path / "out", method=calibrated(size=int(least * 1.005)))
    assert moepack.verify(tmp_path / "out").ok


MET = [
    calibrated(size="1.2MB"),
    Auto(ratio=0.3, calibration="none"),
    Auto(bits_per_weight=4.0, calibration="none"),
    calibrated(size="3.6MB", prefer="speed"),
]


@pytest.mark.usefixtures("fast_widths")
@pytest.mark.parametrize("method", MET, ids=["size", "ratio", "bits", "speed"])
def test_a_size_is_met_and_expected_by_the_plan(method: Auto, tmp_path: Path) -> None:
    plan = estimate(TINY_MOE, tmp_path / "out", method)
    assert plan.plan is not None and plan.goal is not None
    report = moepack.compress(TINY_MOE, tmp_path / "out", method=plan.plan)
    assert 0.995 * plan.goal.nbytes < weight_bytes(tmp_path / "out") <= plan.goal.nbytes
    assert plan.after == pytest.approx(report.packed_bytes, rel=0.02)
    assert plan.disk >= report.packed_bytes


def test_a_text_meets_the_size_too_and_saves_loss(tmp_path: Path) -> None:
    losses = {}
    for name, method in {"free": Auto(size="1.2MB", calibration=None), "text": calibrated(size="1.2MB")}.items():
        moepack.compress(TINY_MOE, tmp_path / name, method=method)
        assert 0.99 * 1_200_000 < weight_bytes(tmp_path / name) <= 1_200_000
        losses[name] = moepack.evaluate(tmp_path / name, NOVEL, 8000).loss
    assert losses["text"] < losses["free"]


def table(coded: float) -> Speeds:
    """Speeds of a machine whose coded integers have a fraction of the speed of integers."""
    return Speeds("test", {**dict.fromkeys(("int2", "int3", "int4", "int8"), 5e9), "coded2": 5e9 * coded}, 1e12)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Speeds:
    """Products of integers are 50 times as fast as those of coded integers, and take most of a step."""
    found = table(0.02)
    monkeypatch.setattr("moepack.backends.targets.speeds_here", lambda device="cpu": found)
    return found


# ---- speed


def test_the_default_balances_loss_and_speed(slow: Speeds, tmp_path: Path) -> None:
    """Its loss is the least at 0.7 of the speed of `speed`; the size is met; the manifest has the speeds used."""
    made = {}
    for prefer in ("quality", "balance", "speed"):
        plan = estimate(TINY_MOE, tmp_path / "out", Auto(bits_per_weight=4.0, prefer=prefer, calibration="none")).plan
        assert plan is not None and plan.machine == "test"
        assert [each.name for each in plan.preferences] == ["quality", "balance", "speed"]
        own = next(each for each in plan.preferences if each.name == prefer)
        assert plan.token_seconds == own.seconds
        made[prefer] = plan
    seconds = {name: plan.token_seconds for name, plan in made.items()}
    assert seconds["speed"] < seconds["balance"] <= seconds["speed"] / 0.7 < seconds["quality"]
    assert seconds["balance"] > 0.95 * seconds["speed"] / 0.7, "time is used"
    assert made["quality"].packer.loss < made["balance"].packer.loss < made["speed"].packer.loss
    kinds = {name: {type(each) for each in plan.decisions.values()} for name, plan in made.items()}
    assert kinds["quality"] == {float} and kinds["balance"] == {float, list}  # steps, widths
    report = moepack.compress(TINY_MOE, tmp_path / "out", method=made["balance"])
    goal = made["balance"].goal
    assert goal is not None and 0.995 * goal.nbytes < weight_bytes(tmp_path / "out") <= goal.nbytes
    assert report.packed_bytes > 0
    assert PackedDirectory.open(tmp_path / "out").manifest.settings["speeds"] == slow.to_json()


def test_equal_speeds_change_no_byte(tmp_path: Path) -> None:
    """If coded integers are as fast as others, the default packs what `quality` packs."""
    for prefer in ("quality", "balance"):
        method = Auto(bits_per_weight=3.0, prefer=prefer, calibration="none")
        moepack.compress(TINY_MOE, tmp_path / prefer, method=method)
    files = [
        {file.name: file.read_bytes() for file in (tmp_path / prefer).glob("*.safetensors")}
        for prefer in ("quality", "balance")
    ]
    assert files[0] == files[1]


def test_a_target_replaces_the_machine(slow: Speeds, tmp_path: Path) -> None:
    """The same target gives the same bytes on every machine."""
    described = tmp_path / "doctor.json"
    described.write_text(json.dumps({"speeds": table(0.02).to_json(), "GPU speeds": None}))
    method = {name: Auto(prefer="balance", target=str(described)) for name in ("here", "there")}
    assert method["here"].speeds == table(0.02) and method["here"].needs_balance
    assert Auto(target="avx512").speeds.machine == "avx512"
    with pytest.raises(ValueError, match="avx2-8core, avx512, h100 or a file"):
        _ = Auto(target="my-laptop").speeds
    with pytest.raises(ValueError, match="has no GPU speeds"):
        speeds_of(str(described), "cuda")
    described.write_text(json.dumps({"speeds": {"machine": "x", "10^9 weights/s": {"int4": 1}, "memory GB/s": 1}}))
    with pytest.raises(ValueError, match="coded4"):
        speeds_of(str(described))


def test_experts_count_by_the_share_that_a_token_reads(mixtral: Path) -> None:
    checkpoint = Checkpoint.open(mixtral)
    model = describe(checkpoint)
    shares = reads_by_tensor(checkpoint, model)
    chosen, experts = checkpoint.config["num_experts_per_tok"], model.layers[0].experts
    assert shares[model.layers[0].projections[0].packed_name] == chosen / experts < 1
    assert shares["model.layers.0.self_attn.q_proj.weight"] == 1
    assert shares["model.embed_tokens.weight"] == float(bool(checkpoint.config["tie_word_embeddings"]))


def test_memory_bounds_every_format() -> None:
    fast = Speeds("test", {"int4": 1e12, "coded4": 1e10}, 1e9)
    assert fast.seconds("int", 4, 1e6, 0.5e6) == 0.5e-3, "reading takes longer than arithmetic"
    assert fast.seconds("coded", 4, 1e8, 1.0) == 1e-2
    wide = Speeds("test", {"int2": 2e9, "int4": 1e9, "coded4": 1e9}, 1e12)
    assert wide.seconds("int", 3, 1e9, 1.0) == pytest.approx(0.75), "times are interpolated"


def test_the_plan_shows_the_preferences(slow: Speeds, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "compress", TINY_MOE, tmp_path / "out", "--dry-run", "--calibration", "none")[1]
    for name in ("quality", "balance", "speed"):
        assert re.search(rf"prefer +{name}: [\d.e+]+ tokens/s, \d+ MB of memory", said), said
    assert re.search(r"balance: .* \(chosen\)", said)
    assert re.search(r"costs +balance decodes at [\d.]+ times the speed of quality; decodes at 0.7", said), said


def test_a_text_helps_fast_formats_too(slow: Speeds, tmp_path: Path) -> None:
    """Some tensors are coded and some have fixed widths; both are solved on the text, and a resumed job continues."""
    losses = {}
    methods = {
        name: Auto(bits_per_weight=3.5, prefer="speed", calibration=source, samples=24, sequence_length=128)
        for name, source in {"free": "none", "text": str(NOVEL)}.items()
    }
    for name, method in methods.items():
        report = moepack.compress(TINY_MOE, tmp_path / name, method=method)
        losses[name] = moepack.evaluate(tmp_path / name, NOVEL, 8000).loss
        records = PackedDirectory.open(tmp_path / name).manifest.packed().values()
        assert {record.kind for record in records} == {"coded", "groupwise"}
        assert weight_bytes(tmp_path / name) <= report.packed_bytes
    original = moepack.evaluate(TINY_MOE, NOVEL, 8000).loss
    assert losses["text"] - original < 0.8 * (losses["free"] - original), (losses, original)
    with support.interrupted(Mixed, 12):
        moepack.compress(TINY_MOE, tmp_path / "again", method=methods["text"])
    assert moepack.compress(TINY_MOE, tmp_path / "again", method=methods["text"]).resumed_weights > 0
    assert support.contents(tmp_path / "again") == support.contents(tmp_path / "text")


def test_rows_are_held_where_tables_list_their_integers() -> None:
    matrix = torch.randn(64, 32) * torch.logspace(-2, 2, 64)[:, None]
    scales, rows = Scales(torch.ones(1, 64), torch.ones(1, 32)), torch.ones(64)
    held = _held(matrix, scales, 1.0)[0]
    spreads = (matrix * held[:, None]).square().mean(1).sqrt()
    assert spreads.max() <= 1.0 + 1e-6
    wide = matrix.square().mean(1).sqrt() > 1
    assert torch.equal(held[~wide], rows[~wide]) and spreads[wide].min() > 2**-0.26


def test_measuring_importance_shows_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(
        capsys, "compress", TINY_MOE, tmp_path / "out", "--size", "2MB", "--dry-run",
        "--calibration", NOVEL, "--samples", 4, "--sequence-length", 64,
    )  # fmt: skip
    assert code == 0 and "256 tokens" in error and "sensitivity: " in error and "Loading weights" not in error


def test_without_a_size_memory_decides_where_it_is_short(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(mixtral)
    source = sum(checkpoint.info(name).nbytes for name in checkpoint.names())
    for free, share in ((None, 0.25), (source * 10, 0.25), (source // 5, 0.1)):
        monkeypatch.setattr("moepack.methods.auto.target.available_bytes", lambda free=free: free)
        nbytes, reason = Target().nbytes(checkpoint)
        assert nbytes == pytest.approx(share * source, rel=0.01)
        assert ("memory" in reason) == (share < 0.25)


# ---- jobs


def test_another_size_does_not_continue_a_job(mixtral: Path, tmp_path: Path) -> None:
    with support.interrupted(Coded, 5):
        moepack.compress(mixtral, tmp_path / "again", method=calibrated(ratio=0.8))
    with pytest.raises(ResumeError, match="size"):
        moepack.compress(mixtral, tmp_path / "again", method=calibrated(ratio=0.7))
    assert moepack.compress(mixtral, tmp_path / "again", method=calibrated(ratio=0.8)).resumed_weights > 0
    moepack.compress(mixtral, tmp_path / "whole", method=calibrated(ratio=0.8))
    assert support.contents(tmp_path / "whole") == support.contents(tmp_path / "again")


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v2", "switch_transformers"])
@pytest.mark.parametrize("prefer", ["quality", "speed"])
def test_every_architecture_is_packed(architecture: str, prefer: str, tiny_checkpoint: Any, tmp_path: Path) -> None:
    moepack.compress(tiny_checkpoint(architecture), tmp_path / "out", method=calibrated(ratio=0.9, prefer=prefer))
    assert moepack.verify(tmp_path / "out").ok


def test_a_missing_text_is_noticed_at_once(tmp_path: Path) -> None:
    for refused in (estimate, moepack.compress):
        with pytest.raises(CalibrationError, match="no such calibration file"):
            refused(tmp_path / "no-model", tmp_path / "out", method=Rate(3.0, calibration=str(tmp_path / "no.txt")))


def test_a_small_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moepack.pipeline.estimate._free_disk", lambda _: 1000)
    with pytest.raises(DiskError, match="1,000 are free"):
        estimate(TINY_MOE, tmp_path / "out", Auto(size="1MB"))


# ---- importance


def test_squared_gradients_predict_the_loss_of_noise() -> None:
    """Noise on one tensor increases the loss by half its importance times the squared noise, within a factor of two."""
    checkpoint = Checkpoint.open(TINY_MOE)
    model = describe(checkpoint)
    samples = calibrated(size="3MB").request.load(checkpoint)  # type: ignore[union-attr]
    known = fisher(checkpoint, model, find_balances(model), samples, torch.device("cpu"))
    assert known is not None
    found = {name: own.mean for name, own in known.items()}
    linears = {linear.source for dense in model.dense for linear in dense.linears}
    assert set(found) == linears | {part.packed_name for layer in model.layers for part in layer.projections}
    last = model.layers[-1].projections[-1]
    values, queries = (found[f"model.layers.3.self_attn.{name}_proj.weight"] for name in "vq")
    assert values > queries > found[last.packed_name] > 0


def test_a_plan_promises_only_measured_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan gives a range with a text, and says "unknown" without one."""

    def loss(method: Auto) -> tuple[float, float] | None:
        plan = estimate(TINY_MOE, tmp_path / "out", method).plan
        assert plan is not None
        return plan.loss

    known = loss(calibrated(size="3MB"))
    assert known is not None and 0 < known[0] < known[1]
    assert loss(Auto(size="3MB")) is not None
    assert loss(Auto(size="3MB", calibration=None)) is None
    options = ("--size", "3MB", "--dry-run", "--calibration", "none")
    said = run(capsys, "compress", TINY_MOE, tmp_path / "out", *options)[1]
    assert re.search(r"loss +unknown without calibration; a text \(`--calibration`\)", said), said
    said = run(capsys, "compress", TINY_MOE, tmp_path / "out", "--method", "finequant", "--dry-run")[1]
    assert not re.search(r"loss +", said), said


def test_models_that_do_not_fit_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(TINY_MOE)
    samples = calibrated(size="3MB").request.load(checkpoint)  # type: ignore[union-attr]
    monkeypatch.setattr("moepack.calibration.fisher.available_bytes", lambda: 1000)
    model = describe(checkpoint)
    assert fisher(checkpoint, model, find_balances(model), samples, torch.device("cpu")) is None


def test_the_first_command_makes_a_good_model_of_a_quarter(tmp_path: Path) -> None:
    moepack.compress(TINY_MOE, tmp_path / "out", method=Auto(ratio=0.25))
    assert weight_bytes(tmp_path / "out") <= weight_bytes(TINY_MOE) / 4
    rise = moepack.evaluate(tmp_path / "out", NOVEL, 12_000).loss - moepack.evaluate(TINY_MOE, NOVEL, 12_000).loss
    assert rise < 0.05

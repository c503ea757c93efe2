"""The method `rate`: meets the requested bits, rejects bad weights, and the whole path to a running model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import moepack
import packed_support as support
from moepack import _core
from moepack.checkpoint import Checkpoint, describe
from moepack.errors import InvalidTensorError
from moepack.format import PackedDirectory
from moepack.methods import create
from moepack.methods.rate import Rate
from moepack.methods.rate.coder import Coder, bound
from moepack.methods.rate.sample import take_sample
from moepack.methods.rate.step_size import find_step
from places import NOVEL, TINY_MOE


def rate_of(directory: Path) -> float:
    records = PackedDirectory.open(directory).manifest.packed().values()
    weights = sum(torch.Size(record.shape).numel() for record in records)
    return 8 * sum(record.nbytes for record in records) / weights


@pytest.mark.parametrize("bits", [1.5, 3.0, 5.0, 6.5, 8.0])
def test_takes_the_bits_that_were_asked_for(bits: float, tmp_path: Path) -> None:
    """Within 0.5 % on a model with short rows and small tensors."""
    moepack.compress(TINY_MOE, tmp_path / "packed", method=Rate(bits))
    assert rate_of(tmp_path / "packed") == pytest.approx(bits, rel=0.005)


def test_more_bits_lose_less(tmp_path: Path) -> None:
    text = NOVEL
    losses = []
    for bits in (1.5, 2.5, 5.0):
        moepack.compress(TINY_MOE, tmp_path / str(bits), method=Rate(bits))
        losses.append(moepack.evaluate(tmp_path / str(bits), text, 6000).loss)
    original = moepack.evaluate(TINY_MOE, text, 6000).loss
    assert losses[0] > losses[1] > losses[2] > original - 0.02
    assert losses[2] < original + 0.02


def test_packs_the_selected_roles(mixtral: Path, tmp_path: Path) -> None:
    linears = [linear for dense in describe(Checkpoint.open(mixtral)).dense for linear in dense.linears]
    found = {}
    for roles in ("none", "attention", "all"):
        moepack.compress(mixtral, tmp_path / roles, method=Rate(3.0, roles=roles))
        records = PackedDirectory.open(tmp_path / roles).manifest.packed().values()
        assert {record.kind for record in records} == {"coded"}
        found[roles] = {record.details.get("role", "experts") for record in records}
    assert found["none"] == {"experts"} and found["attention"] == {"experts", "attention"}
    assert found["all"] == {"experts", *(linear.role for linear in linears)}


def test_bytes_do_not_depend_on_threads_or_interruptions(mixtral: Path, tmp_path: Path) -> None:
    torch_threads, core_threads = torch.get_num_threads(), _core.threads()
    try:
        moepack.compress(mixtral, tmp_path / "one", method=Rate(2.5), threads=1)
        moepack.compress(mixtral, tmp_path / "four", method=Rate(2.5), threads=4)
    finally:
        torch.set_num_threads(torch_threads)
        _core.set_threads(core_threads)
    assert support.contents(tmp_path / "one") == support.contents(tmp_path / "four")
    with support.interrupted(Coder, 9):
        moepack.compress(mixtral, tmp_path / "again", method=Rate(2.5))
    assert moepack.compress(mixtral, tmp_path / "again", method=Rate(2.5)).resumed_weights > 0
    assert support.contents(tmp_path / "one") == support.contents(tmp_path / "again")


def changed(source: Path, directory: Path, name: str, change: Any) -> Path:
    """A copy of a checkpoint with one tensor changed."""
    directory.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        if name in tensors:
            tensors[name] = change(tensors[name].clone())
        save_file(tensors, directory / file.name, metadata={"format": "pt"})
    return directory


def a_tensor(source: Path) -> str:
    return describe(Checkpoint.open(source)).layers[0].projections[0].parts[0].tensor


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_is_refused_and_the_tensor_named(value: float, mixtral: Path, tmp_path: Path) -> None:
    def damage(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[tensor.numel() // 2] = value
        return tensor

    name = a_tensor(mixtral)
    model = changed(mixtral, tmp_path / "model", name, damage)
    with pytest.raises(InvalidTensorError, match="NaN or infinite"):
        moepack.compress(model, tmp_path / "packed", method=Rate(3.0))
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("factor", [0.0, 1e6])
def test_zeros_and_outliers_survive(factor: float, mixtral: Path, tmp_path: Path) -> None:
    """A matrix of zeros, and a weight of a million times the usual size, which becomes an exception."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not factor:
            return torch.zeros_like(tensor)
        tensor.view(-1)[5] *= factor
        return tensor

    model = changed(mixtral, tmp_path / "model", a_tensor(mixtral), change)
    moepack.compress(model, tmp_path / "packed", method=Rate(3.0))
    assert not moepack.verify(tmp_path / "packed").faults


@pytest.mark.parametrize("bits", [0.39, 8.1, float("nan")])
def test_rates_out_of_range_are_refused(bits: float) -> None:
    with pytest.raises(ValueError, match=r"bits_per_weight must be 0\.4 to 8, not"):
        create("rate", bits_per_weight=bits)


def test_unknown_roles_are_refused() -> None:
    with pytest.raises(ValueError, match="routers"):
        create("rate", bits_per_weight=2, roles="attention,routers")


def test_a_rate_below_the_metadata_is_refused_with_the_least(mixtral: Path) -> None:
    checkpoint = Checkpoint.open(mixtral)
    sample = take_sample(checkpoint, describe(checkpoint), frozenset())
    with pytest.raises(ValueError, match=r"metadata alone takes \d\.\d+ bits per weight"):
        find_step(sample, 0.01)


def test_the_bound_holds() -> None:
    for shape in [(1, 1, 1), (1, 3, 15), (2, 65, 100), (0, 3, 4), (2, 5, 0)]:
        symbols = torch.randint(-(1 << 20), 1 << 20, shape, dtype=torch.int32).numpy()
        blob = _core.encode_coded(symbols, torch.ones(1, 1).numpy(), ndim=3)
        assert blob.nbytes <= bound(shape)


def calibrated(text: Path, bits: float = 3.0, **options: Any) -> Rate:
    return Rate(bits, calibration=str(text), samples=3, sequence_length=32, group=3, **options)


@pytest.mark.parametrize("bits", [1.25, pytest.param(3.0, marks=pytest.mark.slow)])
def test_a_text_keeps_the_bits_and_lowers_the_loss(bits: float, tmp_path: Path) -> None:
    novel = NOVEL
    methods = {"free": Rate(bits), "text": Rate(bits, calibration=str(novel), samples=24, sequence_length=128)}
    losses = {}
    for name, method in methods.items():
        moepack.compress(TINY_MOE, tmp_path / name, method=method)
        losses[name] = moepack.evaluate(tmp_path / name, novel, 4000).loss
        assert rate_of(tmp_path / name) == pytest.approx(bits, rel=0.005)
    assert losses["text"] < losses["free"]


def test_later_layers_compensate_the_bits_of_earlier_ones(mixtral: Path, text: Path) -> None:
    checkpoint, method = Checkpoint.open(mixtral), calibrated(text)
    plan = method.plan(checkpoint, describe(checkpoint))
    assert isinstance(plan.packer, Coder)
    before = dict(plan.packer.corrected_solver({})._bits)
    first = describe(checkpoint).layers[0].projections[0].packed_name
    taken = round(1.1 * before.pop(first) / 8)
    after = plan.packer.corrected_solver({first: taken})._bits
    excess = 8 * taken - plan.decisions[first]
    assert sum(after.values()) == pytest.approx(sum(before.values()) - excess)
    assert after.keys() == before.keys()
    # Narrow projections take only their scales.
    assert all(after[name] <= bits for name, bits in before.items()) and any(
        after[name] < before[name] for name in after
    )


@pytest.mark.parametrize(
    "architecture",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "qwen3_moe")),
        "deepseek_v2",
        "switch_transformers",
    ],
)
def test_every_architecture_is_calibrated(architecture: str, tiny_checkpoint: Any, text: Path, tmp_path: Path) -> None:
    """With all linear layers; the head is rounded without its inputs."""
    model = tiny_checkpoint(architecture)
    moepack.compress(model, tmp_path / "packed", method=calibrated(text, 4.0))
    assert not moepack.verify(tmp_path / "packed").faults
    linears = [linear for dense in describe(Checkpoint.open(model)).dense for linear in dense.linears]
    records = PackedDirectory.open(tmp_path / "packed").manifest.packed().values()
    assert {record.details.get("role", "experts") for record in records} == {"experts", *(x.role for x in linears)}


def test_a_calibrated_job_continues_to_the_same_bytes(
    mixtral: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moepack.compress(mixtral, tmp_path / "whole", method=calibrated(text))
    solve, calls = Coder.solve, []

    def few(coder: Coder, stage: Any) -> Any:
        calls.append(stage)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return solve(coder, stage)

    with monkeypatch.context() as stopping, pytest.raises(KeyboardInterrupt):
        stopping.setattr(Coder, "solve", few)
        moepack.compress(mixtral, tmp_path / "again", method=calibrated(text))
    assert moepack.compress(mixtral, tmp_path / "again", method=calibrated(text)).resumed_weights > 0
    assert support.contents(tmp_path / "whole") == support.contents(tmp_path / "again")


def test_an_expert_that_no_token_reaches_is_named(mixtral: Path, text: Path, tmp_path: Path) -> None:
    """A text of one token reaches two experts of a layer."""
    short = tmp_path / "short.txt"
    short.write_text("a" * 2000)
    report = moepack.compress(
        mixtral, tmp_path / "packed", method=Rate(3.0, calibration=str(short), samples=1, sequence_length=1)
    )
    assert any("no calibration token reached" in note for note in report.notes)
    assert not moepack.verify(tmp_path / "packed").faults


@pytest.mark.parametrize("factor", [0.0, 1e6])
def test_zeros_and_outliers_survive_a_text(factor: float, mixtral: Path, text: Path, tmp_path: Path) -> None:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not factor:
            return torch.zeros_like(tensor)
        tensor.view(-1)[5] *= factor
        return tensor

    model = changed(mixtral, tmp_path / "model", a_tensor(mixtral), change)
    moepack.compress(model, tmp_path / "packed", method=calibrated(text))
    assert not moepack.verify(tmp_path / "packed").faults


def test_nan_is_refused_with_a_text_too(mixtral: Path, text: Path, tmp_path: Path) -> None:
    model = changed(mixtral, tmp_path / "model", a_tensor(mixtral), lambda tensor: tensor * float("nan"))
    with pytest.raises(InvalidTensorError, match="NaN or infinite"):
        moepack.compress(model, tmp_path / "packed", method=calibrated(text))

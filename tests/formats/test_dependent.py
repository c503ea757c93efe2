"""Dependent codes: search results, expected code lengths, and which tensors use them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import moepack
from moepack import _core
from moepack.checkpoint import Checkpoint, describe
from moepack.format import PackedDirectory
from moepack.methods.rate import Rate
from moepack.methods.rate.step_size import encoded
from moepack.solvers.priced import LARGEST, Profile, least_spread, round_priced, scale_of, symbols_of, worth_of
from moepack.solvers.uniform import CodeLengths, UniformProblem, sampled_lengths
from moepack.tuning.tensors import Scales
from places import NOVEL, TINY_MOE


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def rounded(values: torch.Tensor, step: float, dependent: bool) -> tuple[torch.Tensor, float, float]:
    """Codes, their expected bits, and the bits that they take when coded."""
    profile = Profile()
    profile.add(values, 1.0)
    lengths = profile.lengths(step, worth_of(dependent), dependent)
    codes = round_priced(values, step, lengths, lengths.worth)
    return codes, profile.bits(step, lengths, lengths.worth), 8.0 * encoded(codes[None], LARGEST, dependent).nbytes


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 15, 16, 130])
def test_rounded_values_are_coded_and_decoded(columns: int) -> None:
    codes, _, _ = rounded(drawn(40, columns), 0.7, dependent=True)
    assert bool((codes % 2 != 0).all())
    assert np.array_equal(_core.decode_coded(encoded(codes[None], LARGEST, True)), codes[None].int().numpy())


@pytest.mark.parametrize("step", [0.4, 0.8, 1.4])
def test_the_bits_of_a_model_are_known_from_its_profile(step: float) -> None:
    values = drawn(256, 512) * torch.linspace(0.5, 2, 256)[:, None]
    codes, expected, stored = rounded(values, step, dependent=True)
    assert expected < stored < 1.05 * expected  # states and tables take the rest
    profile = Profile()
    profile.add(values, 1.0)
    lengths = profile.lengths(step, worth_of(True), True)
    assert lengths.total(values, codes) == pytest.approx(expected, rel=0.004)


@pytest.mark.parametrize("step", [0.4, 0.8])
def test_a_path_leaves_less_error_at_equal_bytes(step: float) -> None:
    values = drawn(256, 512)
    plain, _, bits = rounded(values, step, dependent=False)
    for _ in range(4):
        codes, _, own = rounded(values, step, dependent=True)
        error = (codes * scale_of(step, True) - values).square().mean()
        step *= 2 ** ((own - bits) / values.numel())
    assert own == pytest.approx(bits, rel=0.005)
    assert error < 0.83 * (plain * (0.4 if bits > 2.7 * values.numel() else 0.8) - values).square().mean()


def test_symbols_are_indices() -> None:
    for dtype in (torch.int8, torch.int16, torch.int32):
        codes = torch.tensor([1, 5, -3, -1, -5, 3, -127, 125], dtype=dtype)
        assert symbols_of(codes, True).tolist() == [0, 1, -1, 0, 1, -1, -32, 31]
        assert symbols_of(codes, True).dtype == dtype


def hessians(experts: int, columns: int) -> torch.Tensor:
    x = drawn(experts, 4 * columns, columns) @ drawn(columns, columns) / columns**0.5
    return x.transpose(1, 2) @ x


@pytest.mark.parametrize("columns", [96, 131])
def test_compensation_leaves_less_error_than_plain_codes(columns: int) -> None:
    """At equal bits, by the step."""
    weights, seen = drawn(2, 64, columns), hessians(2, columns)
    runs = torch.arange(2)[:, None].expand(2, 64)
    errors: dict[bool, float] = {}
    step, wanted = 0.8, 0.0
    for dependent in (False, True):
        problem = UniformProblem(weights, seen, dependent=dependent)
        for _ in range(5 if dependent else 1):
            price = problem.settings.worth * step**2 * float(problem.curvature.mean())
            lengths = sampled_lengths(weights / step, torch.full((2,), 0.01))
            for _ in range(2):
                result = problem.solve(step, price, lengths)
                lengths = CodeLengths.counted(result.codes, runs, dependent=dependent)
            bits = float(lengths.totals.sum())
            wanted = wanted or bits
            step *= 2 ** ((bits - wanted) / weights.numel())
        lost = weights - result.values
        errors[dependent] = float((torch.bmm(lost, seen) * lost).sum())
        assert encoded(result.codes, LARGEST, dependent).nbytes > 0
    assert errors[True] < 0.95 * errors[False]


@pytest.mark.parametrize("change", ["zero", "huge", "dead"])
def test_bad_inputs_are_survived(change: str) -> None:
    weights, seen = drawn(2, 20, 33), hessians(2, 33)
    if change == "zero":
        weights[0] = 0
    elif change == "huge":
        weights[0, 3, 4] = 1e6
    else:
        seen[1] = 0
    problem = UniformProblem(weights, seen, dependent=True)
    lengths = sampled_lengths(weights / 0.7, torch.full((2,), 0.01), dependent=True)
    result = problem.solve(0.7, 0.01 * float(problem.curvature.mean()), lengths)
    assert bool(torch.isfinite(result.values).all()) and encoded(result.codes, LARGEST, True).nbytes > 0
    assert (result.reports[1].reason is not None) == (change == "dead")


def test_overflowing_compensation_falls_back_to_rounding() -> None:
    weights = drawn(1, 4, 8)
    weights[0, 0, 0] = 3e38
    problem = UniformProblem(weights, hessians(1, 8) + 50, dependent=True)
    problem.factors.upper[0, 0, 1:] = 1e10
    result = problem.solve(0.5, 0.001, sampled_lengths(drawn(1, 4, 8), torch.full((1,), 0.01), dependent=True))
    assert result.reports[0].reason == "the compensated weights overflow"


def test_row_blocks_are_as_wide_as_their_narrowest() -> None:
    values = torch.ones(40, 8)
    values[32:] = 0.25
    assert least_spread(values) == pytest.approx(0.25)
    assert least_spread(values[None]) == pytest.approx(0.25)
    assert least_spread(values[:0]) == float("inf")


def records(directory: Path) -> dict[str, bool]:
    return {
        name: record.details["symbols"] == "dependent"
        for name, record in PackedDirectory.open(directory).manifest.packed().items()
    }


@pytest.mark.parametrize("bits", [2.2, 3.2])
def test_a_model_loses_less_than_with_plain_codes(bits: float, tmp_path: Path) -> None:
    text = NOVEL
    losses, sizes = {}, {}
    for codes in ("plain", "dependent"):
        out = tmp_path / codes
        moepack.compress(TINY_MOE, out, method=Rate(bits, codes=codes))
        losses[codes] = moepack.evaluate(out, text, 6000).loss
        sizes[codes] = sum(record.nbytes for record in PackedDirectory.open(out).manifest.packed().values())
    assert not any(records(tmp_path / "plain").values())
    assert sum(records(tmp_path / "dependent").values()) > 20  # of 29; some have few bits
    assert sizes["dependent"] == pytest.approx(sizes["plain"], rel=0.01)
    assert losses["dependent"] < losses["plain"]


@pytest.mark.parametrize("bits", [1.25, 6.5])
def test_few_bits_and_low_bits_stay_plain(bits: float, tmp_path: Path) -> None:
    moepack.compress(TINY_MOE, tmp_path / "packed", method=Rate(bits))
    assert not all(records(tmp_path / "packed").values())


def test_a_tensor_with_rows_of_zeros_stays_plain(tmp_path: Path) -> None:
    name = describe(Checkpoint.open(TINY_MOE)).layers[0].projections[0].parts[0].tensor
    model = tmp_path / "model"
    model.mkdir()
    for file in TINY_MOE.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        if name in tensors:
            tensors[name] = tensors[name].clone()
            tensors[name][..., :16, :] = 0
        save_file(tensors, model / file.name, metadata={"format": "pt"})
    moepack.compress(model, tmp_path / "packed", method=Rate(3.0))
    assert list(records(tmp_path / "packed").values()).count(False) == 1


def test_tuning_keeps_the_kind() -> None:
    codes, _, _ = rounded(drawn(32, 64), 0.7, dependent=True)
    data = torch.from_numpy(
        _core.encode_coded(codes[None].numpy(), np.ones((1, 1), np.float32), ndim=3, symbols="dependent")
    )
    again = Scales(data).blob()
    assert _core.PackedTensor(again.numpy()).details()["symbols"] == "dependent"
    assert np.array_equal(_core.decode_coded(again.numpy()), codes[None].int().numpy())


def test_unknown_codes_are_refused() -> None:
    with pytest.raises(ValueError, match="codes must be dependent or plain"):
        Rate(2.0, codes="odd")

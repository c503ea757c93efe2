"""The method `milo`: joint optimization, rank policies, budgets, bad input, and the whole path to a running model."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import moepack
import packed_support as support
import tiny_models
from moepack import _core
from moepack.cli import main
from moepack.errors import InvalidTensorError
from moepack.export import export
from moepack.format import PackedDirectory
from moepack.format.balance import balance_of
from moepack.methods import create
from moepack.methods.milo import Milo
from moepack.methods.milo.joint import JointSettings, compensate
from moepack.methods.milo.packing import Assembly, base_bytes, pack, packed_bytes
from moepack.methods.milo.planning import Planner, Source
from moepack.methods.milo.ranks import named_ranks, parse_ranks
from moepack.methods.milo.statistics import kurtosis, residual_rank, residual_spectrum
from moepack.solvers.affine import GroupSpec, quantize_affine
from moepack.solvers.least_squares import LeastSquares
from runtime_support import logits, tiny_model, write_packed

SPEC, SOLVER = GroupSpec(3, 64), LeastSquares()


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def heavy(experts: int = 2, rows: int = 96, columns: int = 128) -> torch.Tensor:
    """Gaussian weights with a few strong directions, like attention's."""
    return gaussian(experts, rows, columns) + gaussian(experts, rows, 4, seed=1) @ gaussian(experts, 4, columns, seed=2)


def relative(weights: torch.Tensor, found: Any) -> list[float]:
    return ((found.values() - weights).square().sum((1, 2)) / weights.square().sum((1, 2))).tolist()


def test_ranks_reduce_the_error_and_joint_beats_one_pass() -> None:
    weights = heavy()
    errors = [relative(weights, compensate(weights, rank, SPEC, SOLVER, JointSettings())) for rank in (0, 8, 24, 64)]
    for more, less in zip(errors[1:], errors, strict=False):
        assert all(a < b for a, b in zip(more, less, strict=True))
    once = relative(weights, compensate(weights, 24, SPEC, SOLVER, JointSettings(rounds=1)))
    assert all(a < 0.97 * b for a, b in zip(errors[2], once, strict=True))


def test_refining_is_worth_it_and_errors_match_the_stored_values() -> None:
    weights = heavy()
    late = compensate(weights, 24, SPEC, SOLVER, JointSettings(refine=False))
    inside = compensate(weights, 24, SPEC, SOLVER, JointSettings())
    assert float(inside.errors.sum()) < float(late.errors.sum())
    for found in (late, inside):
        torch.testing.assert_close(
            found.errors, (found.values() - weights).double().square().sum((1, 2)), rtol=1e-4, atol=0
        )


@pytest.mark.parametrize("bits", [3, 8, 16])
def test_the_best_round_is_kept_and_the_stop_rule_is_the_papers(bits: int) -> None:
    weights = heavy(3, 64, 64)
    settings = JointSettings(rank_bits=bits)
    found = compensate(weights, 8, SPEC, SOLVER, settings)
    for trace, rounds, error in zip(found.traces, found.rounds, found.errors.tolist(), strict=True):
        assert len(trace) == rounds <= 20 and min(trace) == pytest.approx(error**0.5, rel=1e-5)
        means = [sum(trace[max(0, t - 2) : t + 1]) / len(trace[max(0, t - 2) : t + 1]) for t in range(rounds)]
        falls = [(before - mean) / before for before, mean in pairwise(means)]
        assert all(fall >= 1e-4 for fall in falls[:-1]) and (rounds == 20 or falls[-1] < 1e-4)
    alone = compensate(weights[1:2], 8, SPEC, SOLVER, settings)
    torch.testing.assert_close(alone.values()[0], found.values()[1], rtol=0, atol=1e-3)


def test_rank_zero_is_the_plain_quantizer() -> None:
    weights = gaussian(2, 32, 64)
    found = compensate(weights, 0, SPEC, SOLVER, JointSettings())
    assert torch.equal(found.values(), quantize_affine(weights, SPEC, SOLVER).values())
    assert found.rounds == [1, 1]


@pytest.mark.parametrize("bits", [3, 8, 16])
def test_degenerate_matrices(bits: int) -> None:
    """Zero matrices, constant groups, all-negative groups, ranks up to the matrix's own and beyond what is in it."""
    cases = torch.stack(
        [torch.zeros(16, 64), torch.full((16, 64), -0.75), -gaussian(16, 64).abs() - 0.1, torch.eye(16, 64)]
    )
    for rank in (0, 1, 16):
        found = compensate(cases, rank, SPEC, SOLVER, JointSettings(rank_bits=bits))
        values = found.values()
        assert values.isfinite().all() and not values[0].any()
        assert torch.allclose(values[1], cases[1], rtol=2e-3)
        assert (values[2] - cases[2]).norm() < 0.05 * cases[2].norm()
    with pytest.raises(ValueError, match="rank 17 of matrices of 16 x 64"):
        compensate(cases, 17, SPEC, SOLVER, JointSettings())
    with pytest.raises(InvalidTensorError, match="'w': holds nan"):
        compensate(cases * torch.nan, 4, SPEC, SOLVER, JointSettings(), name="w")


def test_statistics() -> None:
    weights = torch.stack(
        [gaussian(64, 64), torch.rand(64, 64, generator=torch.Generator().manual_seed(0)), torch.ones(64, 64)]
    )
    weights[0, 0, 0] = 1.0
    found = kurtosis(weights).tolist()
    centred = weights[0].double() - weights[0].double().mean()
    assert found[0] == pytest.approx(float((centred**4).mean() / (centred**2).mean() ** 2 - 3), rel=1e-3)
    assert found[1] == pytest.approx(-1.2, abs=0.05) and found[2] == 0
    residual = torch.diag_embed(torch.tensor([[4.0, 2.1, 1.9, 0.0]]))
    spectrum = residual_spectrum(residual)
    torch.testing.assert_close(spectrum, torch.tensor([[16.0, 4.41, 3.61, 0.0]]))
    assert residual_rank(spectrum, 4) == [2] and residual_rank(spectrum, 5) == [None]


def matrices(dense: int, experts: int, side: int = 128) -> tuple[Any, Any]:
    """The smaller sides of a model's matrices, and the dense ones among them."""
    return np.repeat([side, side // 2], [dense, experts]), np.repeat([True, False], [dense, experts])


@pytest.mark.parametrize("side", [128, 2048])
@pytest.mark.parametrize("policy", ["kurtosis", "frequency"])
@pytest.mark.parametrize("rank", [0, 1, 16, 24, 40])
def test_averages_are_met_exactly(policy: str, rank: int, side: int) -> None:
    found = matrices(3, 64, side)
    rng = np.random.default_rng(0)
    scores, step = rng.pareto(1.0, 67), 8 if side == 128 else 16
    ranks = named_ranks(parse_ranks(f"{policy}:{rank}"), *found, scores, scores)
    assert not ranks[:3].any() and not (ranks % step).any() and ranks.max() <= side // 2
    assert ranks[3:].sum() == 64 * rank // step * step
    order = np.argsort(scores[3:])
    assert (np.diff(ranks[3:][order]) >= -step).all() and (rank < step or ranks[3:][order[-1]] > ranks[3:][order[0]])


def test_policies_add_up_and_stop_at_the_matrix() -> None:
    found = matrices(2, 8)
    flat = np.ones(10)

    def ranks(spec: str) -> list[int]:
        return named_ranks(parse_ranks(spec), *found, flat, flat).tolist()

    assert ranks("uniform:16") == [16] * 10
    assert ranks("dense:512") == [128] * 2 + [0] * 8
    assert ranks("sparse:24") == [0] * 2 + [24] * 8
    assert ranks("dense:32+sparse:16+uniform:8") == [40] * 2 + [24] * 8
    assert sum(ranks("uniform:12")) == 10 * 12
    assert ranks("uniform:0") == [0] * 10
    assert ranks("sparse:1000") == [0] * 2 + [64] * 8
    with pytest.raises(ValueError, match="requires a calibration text"):
        named_ranks(parse_ranks("frequency:8"), *found, flat, None)


@pytest.mark.parametrize("spec", ["", "dense", "dense:-1", "dense:1.5", "best:3", "dense:8+", "budget:5+dense:8"])
def test_invalid_specifications_are_rejected(spec: str) -> None:
    with pytest.raises(ValueError, match="rank"):
        parse_ranks(spec)


class Given(Source):
    """A tensor of two experts, one three times the other."""

    def origin(self, expert: int) -> str:
        return "w"

    def experts(self, which: Any, device: torch.device) -> torch.Tensor:
        return gaussian(1, 64, 128) * torch.tensor([1.0, 3.0])[list(which), None, None]


def test_a_budget_weighs_experts_by_their_size_or_their_frequency() -> None:
    tensor = Given("w", (2, 64, 128), "layer", cast(Any, None))
    by_size = Planner([SPEC], SOLVER, 3, torch.device("cpu"))._propose(tensor, SPEC, 8)
    np.testing.assert_allclose(by_size.chains[1].gains, 9 * by_size.chains[0].gains, rtol=0.05)
    counts = {"layer": [74, 24]}  # and one each
    by_frequency = Planner([SPEC], SOLVER, 3, torch.device("cpu"), counts)._propose(tensor, SPEC, 8)
    np.testing.assert_allclose(3 * by_frequency.chains[1].gains, by_frequency.chains[0].gains, rtol=0.05)
    assert by_size.loss == pytest.approx(by_frequency.loss, rel=0.02)


@pytest.mark.parametrize("bits", [3, 8, 16])
@pytest.mark.parametrize("symmetric", [False, True])
def test_sizes_equal_the_core_s_output(bits: int, symmetric: bool) -> None:
    for shape, ranks in [((3, 40, 100), [8, 0, 16]), ((1, 1, 1), [1]), ((2, 20, 64), [0, 0]), ((0, 4, 8), [])]:
        spec = GroupSpec(3, 64, symmetric)
        made = pack(Assembly(shape, spec, ranks, bits).parts(), spec, ranks, bits, 3)
        kind, data, details = made.kind, made.data, made.details
        assert data.nbytes == packed_bytes(shape, spec, sum(ranks), bits)
        if not any(ranks):
            assert kind == "groupwise" and data.nbytes == base_bytes(shape, spec) and "rank_bits" not in details
        else:
            assert kind == "compensated" and _core.PackedTensor(data).parameters("ranks").tolist() == ranks
            assert details["rank_bits"] == bits and details["symmetric"] == symmetric


@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 5}, {"bits": "x"}, {"group_size": 48}, {"group_size": "row"}, {"solver": "best"}, {"rank_bits": 4},
        {"rank": "best:3"}, {"rank": "dense:8", "memory_budget": 10}, {"memory_budget": 0}, {"rounds": 0},
        {"rank": "frequency:8"}, {"colour": 1},
    ],
)  # fmt: skip
def test_unknown_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"bits|group_size|solver|rank|memory_budget|rounds|colour"):
        create("milo", **settings)


def files_size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


@pytest.fixture(scope="module")
def bare(mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Mixtral without compensators."""
    out = tmp_path_factory.mktemp("milo") / "bare"
    moepack.compress(mixtral, out, method=Milo(rank="uniform:0", solver="rtn"))
    return out


def test_plain_quantization_is_stored_as_such(bare: Path) -> None:
    records = PackedDirectory.open(bare).manifest.packed()
    assert {record.kind for record in records.values()} == {"groupwise"}
    assert {record.details.get("role", "experts") for record in records.values()} == {"experts", "attention"}


def test_a_memory_budget_is_kept_and_spent(mixtral: Path, bare: Path, tmp_path: Path) -> None:
    plain = files_size(bare)
    for share in (1.02, 1.05, 1.2):
        out = tmp_path / f"{share}"
        moepack.compress(mixtral, out, method=Milo(memory_budget=int(plain * share), rounds=2))
        assert 0.97 * share * plain <= files_size(out) <= share * plain
    moepack.compress(mixtral, tmp_path / "percent", method=Milo(rank="budget:5", rounds=2))
    assert files_size(tmp_path / "percent") == pytest.approx(files_size(tmp_path / "1.05"), rel=0.03)
    for symmetric, budget in ((None, plain * 0.8), (False, plain * 0.98)):
        with pytest.raises(ValueError, match=r"less than the size without compensators"):
            moepack.compress(mixtral, tmp_path / "no", method=Milo(memory_budget=int(budget), symmetric=symmetric))


def test_the_packed_model_is_the_dequantized_one(tmp_path: Path) -> None:
    """The packed model gives the logits of the source model with dequantized weights."""
    model = tiny_model("deepseek_v2")
    method = Milo(group_size=16, rank="dense:16+kurtosis:8", rounds=3)
    directory = write_packed(model, tmp_path / "packed", method)
    assert moepack.verify(directory).ok
    opened = PackedDirectory.open(directory)
    kinds = {record.kind for record in opened.manifest.packed().values()}
    assert "compensated" in kinds
    export(directory, tmp_path / "bf16")
    exported = load_file(next((tmp_path / "bf16").glob("*.safetensors")))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for file in directory.glob("model-*.safetensors"):
            for name, values in load_file(file).items():
                if name in parameters and name not in opened.manifest.packed():
                    parameters[name].copy_(values)
        for name, record in opened.manifest.packed().items():
            values = torch.from_numpy(opened.blob(name).dequantize())
            if name in exported:
                assert torch.equal(exported[name], balance_of(directory).restored(name, values[0]).bfloat16())
            if not record.experts:
                parameters[name].copy_(values[0])
                continue
            experts = model.get_submodule(record.module)
            if record.projection == "down_proj":
                experts.down_proj.copy_(values)
            else:
                first = 0 if record.projection == "gate_proj" else record.shape[1]
                experts.gate_up_proj[:, first : first + record.shape[1]].copy_(values)
    torch.testing.assert_close(logits(moepack.load(directory, mode="exact")), logits(model), rtol=1e-4, atol=1e-4)


def test_compensators_bring_the_model_nearer(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    expected, errors = logits(model), []
    for rank in ("uniform:0", "uniform:8", "uniform:32"):
        loaded = moepack.load(write_packed(model, tmp_path / rank, Milo(group_size=16, rank=rank, rounds=5)))
        errors.append(float((logits(loaded) - expected).abs().median()))
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("rank", ["budget:8", "dense:32+kurtosis:16"])
def test_bytes_do_not_depend_on_threads_or_interruptions(rank: str, mixtral: Path, tmp_path: Path) -> None:
    support.assert_same_bytes(mixtral, tmp_path, lambda: Milo(rank=rank, rounds=4), 12)


@pytest.mark.parametrize("rank", ["uniform:8", "budget:5"])
def test_a_weight_that_is_not_a_number_names_its_tensor(rank: str, tmp_path: Path) -> None:
    model = tiny_models.build("mixtral", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if "experts.2.w3" in name)
    tensors[name][5, 7] = torch.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidTensorError, match="holds nan") as caught:
        moepack.compress(model, tmp_path / "out", method=Milo(rank=rank, rounds=1))
    assert caught.value.tensor == name and caught.value.file == str(model / "model.safetensors")


def test_frequency_gives_ranks_to_chosen_experts_and_survives_unchosen_ones(mixtral: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("aaaa " * 40)
    out = tmp_path / "out"
    method = Milo(rank="frequency:16", calibration=str(text), samples=4, sequence_length=16, rounds=1)
    moepack.compress(mixtral, out, method=method)
    manifest = PackedDirectory.open(out).manifest
    assert "calibration_sha256" in manifest.settings
    ranks = [record.details["ranks"] for record in manifest.packed().values() if record.experts]
    assert sum(map(sum, ranks)) == 16 * sum(map(len, ranks))
    assert any(max(row) > min(row) for row in ranks)
    budget = Milo(rank="budget:5", calibration=str(text), samples=4, sequence_length=16, rounds=1)
    moepack.compress(mixtral, tmp_path / "budget", method=budget)
    text.write_text("")
    with pytest.raises(moepack.MoepackError):
        moepack.compress(mixtral, tmp_path / "no", method=Milo(rank="frequency:16", calibration=str(text)))


def test_the_command_line(mixtral: Path, tmp_path: Path, capsys: Any) -> None:
    def run(*arguments: Any) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as caught:
            main([*map(str, arguments)])
        return caught.value.code, "".join(capsys.readouterr())

    out = tmp_path / "out"
    common = ("compress", mixtral, out, "--method", "milo", "-q")
    code, text = run(
        *common,
        "--bits",
        "3",
        "--group-size",
        "32",
        "--solver",
        "hqq",
        "--rank",
        "dense:16+kurtosis:8",
        "--rank-bits",
        "8",
        "--no-refine",
    )
    assert code == 0, text
    code, text = run("inspect", out, "--matrices")
    assert code == 0 and "int3 group 32 + rank" in text and "residual rank" in text
    code, text = run("inspect", out, "--json")
    content = json.loads(text)
    assert content["settings"]["solver"] == "hqq"
    for row in content["tensors"]:
        experts = row["shape"][0] if row["role"] == "experts" else 1
        assert len(row["matrices"]) == experts and 0 < row["error"] < 0.1
        for matrix in row["matrices"]:
            assert matrix["rank"] % 8 == 0 and matrix["residual_rank"] >= 0 and abs(matrix["kurtosis"]) < 3
            assert 0 < matrix["error"] < 0.3
    assert run("verify", out)[0] == 0
    assert run("generate", out, "--prompt", "abc", "--max-new-tokens", "4")[0] == 0
    assert run("eval", out, "--text", _text(tmp_path), "--reference", mixtral)[0] == 0
    for wrong in (("--rank", "best"), ("--memory-budget", "1000"), ("--rank-bits", "5"), ("--alpha", "0.4")):
        assert run(*common[:2], tmp_path / "b", *common[3:], *wrong)[0] == 2


def _text(directory: Path) -> Path:
    (directory / "text.txt").write_text("All happy families are alike. " * 20)
    return directory / "text.txt"

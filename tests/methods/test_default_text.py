"""Methods read the built-in text by default, and pack models that cannot run on it without a text, with a note."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moepack
import packed_support as support
import tiny_models
from command_support import run
from fault_support import Tensors, faulty
from moepack import CalibrationError
from moepack.format import PackedDirectory
from moepack.methods import METHODS, FineQuant, Method, Milo, Rate, create
from moepack.methods.qmoe.ternary import Ternary
from moepack.methods.settings import settings_of
from moepack.pipeline.estimate import estimate
from moepack.textfile import BUILT_IN

pytestmark = pytest.mark.built_in_text

DOWN = "model.layers.1.mlp.experts.down_proj"
SHORT: dict[str, Any] = {"samples": 6, "sequence_length": 64}
BOTH: dict[str, Callable[..., Method]] = {
    "finequant": lambda **more: FineQuant(bits=3, **SHORT, **more),
    "rate": lambda **more: Rate(3.0, **SHORT, **more),
}


@pytest.fixture(params=BOTH)
def made(request: pytest.FixtureRequest) -> Callable[..., Method]:
    return BOTH[request.param]


@pytest.fixture
def broken(mixtral: Path, tmp_path: Path) -> Path:
    """A model with a tokenizer that cannot be parsed."""
    shutil.copytree(mixtral, tmp_path / "broken")
    (tmp_path / "broken/tokenizer.json").write_text("{")
    return tmp_path / "broken"


def fingerprint(packed: Path) -> Any:
    return PackedDirectory.open(packed).manifest.settings.get("calibration_sha256")


def test_every_method_but_milo_has_the_text_by_default() -> None:
    declared = {
        name: next(each.default for each in settings_of(declaration) if each.name == "calibration")
        for name, declaration in METHODS.items()
    }
    assert declared == {**dict.fromkeys(METHODS, BUILT_IN), "milo": None}
    required = {"rate": {"bits_per_weight": 3.0}}
    for name, expected in declared.items():
        method: Any = create(name, **required.get(name, {}))
        assert method.calibration == expected, name
    assert FineQuant().calibration == Rate(3.0).calibration == BUILT_IN and Milo().calibration is None
    assert FineQuant(calibration="none").calibration is Rate(3.0, calibration="none").calibration is None


def test_the_default_reads_the_built_in_text(made: Callable[..., Method], mixtral: Path, tmp_path: Path) -> None:
    named = moepack.compress(mixtral, tmp_path / "named", method=made(calibration=BUILT_IN))
    default = moepack.compress(mixtral, tmp_path / "default", method=made())
    moepack.compress(mixtral, tmp_path / "none", method=made(calibration=None))
    assert support.contents(named.path) == support.contents(default.path) != support.contents(tmp_path / "none")
    assert fingerprint(default.path) and not fingerprint(tmp_path / "none")
    assert not [note for note in default.notes if "built-in text" in note]


def without(made: Callable[..., Method], model: Path, place: Path, reason: str) -> None:
    """Plan and report say why a model is packed without the text, with the bytes of `none`."""
    (note,) = [note for note in estimate(model, place / "default", made()).notes if "built-in text" in note]
    assert "was not used" in note and reason in note
    report = moepack.compress(model, place / "default", method=made())
    assert note in report.notes
    report = moepack.compress(model, place / "none", method=made(calibration=None))
    assert support.contents(place / "default") == support.contents(place / "none")
    assert not [note for note in report.notes if "built-in text" in note]


def test_a_model_without_a_usable_tokenizer(made: Callable[..., Method], broken: Path, tmp_path: Path) -> None:
    without(made, broken, tmp_path, "tokenizer cannot be loaded")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).unlink(missing_ok=True)
    without(made, broken, tmp_path / "other", "tokenizer cannot be loaded")


def test_a_machine_with_too_little_memory(
    made: Callable[..., Method], mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moepack.methods.request.total_bytes", lambda: 1000)
    without(made, mixtral, tmp_path, "only 1 kB are installed; compress on a machine with more memory")


def test_a_model_with_fewer_positions_than_a_window(saved: Callable[[str], Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved("qwen3_moe"), tmp_path / "short"))  # 128 positions
    tiny_models.write_tokenizer(path)
    reason = "512 tokens are longer than the model's 128 positions: use a shorter sequence length"
    without(lambda **more: FineQuant(**more), path, tmp_path, reason)


def test_experts_without_values_are_packed(mixtral: Path, tmp_path: Path) -> None:
    def narrow(tensors: Tensors) -> None:
        for name in tensors:
            if ".experts." in name:
                tensors[name] = (tensors[name][:, :0] if ".w2." in name else tensors[name][:0]).contiguous()

    model = faulty(mixtral, tmp_path, {"intermediate_size": 0}, narrow)
    without(BOTH["finequant"], model, tmp_path, "experts without values")


def test_a_text_that_is_named_or_needed_is_kept(broken: Path, mixtral: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words " * 1000)
    for method in (
        *(made(calibration=str(text)) for made in BOTH.values()),
        FineQuant(bits=3, grid="codebook", **SHORT),
        create("qmoe", **SHORT),
    ):
        with pytest.raises(CalibrationError, match="tokenizer cannot be loaded"):
            moepack.compress(broken, tmp_path / "out", method=method)
    moepack.compress(mixtral, tmp_path / "book", method=FineQuant(bits=3, grid="codebook", **SHORT))
    assert fingerprint(tmp_path / "book")


def test_single_tensors_of_another_method_lose_the_text_too(broken: Path, mixtral: Path, tmp_path: Path) -> None:
    mixed: dict[str, Any] = {"method": Ternary(), "others": {DOWN: BOTH["finequant"]()}}
    report = moepack.compress(broken, tmp_path / "out", **mixed)
    assert [note for note in report.notes if "weights are rounded to nearest without a text" in note]
    moepack.compress(mixtral, tmp_path / "seen", **mixed)
    assert fingerprint(tmp_path / "seen") and not fingerprint(tmp_path / "out")
    others = {DOWN: FineQuant()}
    with pytest.raises(ValueError, match="calibration='none' beside others"):
        moepack.compress(mixtral, tmp_path / "no", method=create("qmoe", **SHORT), others=others)


def test_bits_by_name_keep_the_reason(broken: Path, tmp_path: Path) -> None:
    report = moepack.compress(broken, tmp_path / "out", method="finequant", bits="down_proj=8,*=4", **SHORT)
    assert [note for note in report.notes if "built-in text was not used" in note]


def test_a_single_tensor_is_quantized_from_its_values() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    packed = moepack.GroupwiseTensor.quantize(weight, bits=8, group_size=64)
    torch.testing.assert_close(packed.dequantize().view_as(weight), weight, rtol=0, atol=0.05)


@pytest.mark.parametrize("method", [["finequant"], ["rate", "--bits-per-weight", "3"]])
def test_the_plan_says_what_the_text_costs(
    method: list[str], mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("compress", mixtral, tmp_path / "out", "--dry-run", "--method", *method)
    assert "of it for the calibration text" in run(capsys, *common)[1]
    assert "of it for the calibration text" not in run(capsys, *common, "--calibration", "none")[1]
    fast, slow = (
        estimate(mixtral, tmp_path / "out", create(method[0], samples=samples, **_bits(method))).text_seconds
        for samples in (32, 128)
    )
    assert fast and slow and fast < slow


def _bits(method: list[str]) -> dict[str, float]:
    return {"bits_per_weight": 3.0} if method[0] == "rate" else {}

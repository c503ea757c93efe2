"""Invalid values are rejected before the work, or reported by name, by every method."""

import warnings
from pathlib import Path

import pytest
import torch

import moepack
from fault_support import WEIGHTS, Tensors, assert_refused_by_every_method, every_method, faulty
from moepack import CheckpointError, InvalidTensorError, MoepackWarning, UnsupportedModelError
from moepack.methods.mixins import requested

EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"


def experts(tensors: Tensors, number: int) -> list[str]:
    return [name for name in tensors if f".experts.{number}." in name]


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"]
)
def test_a_missing_tensor_is_named(name: str, mixtral: Path, tmp_path: Path) -> None:
    model = faulty(mixtral, tmp_path, change=lambda tensors: tensors.pop(name))
    assert_refused_by_every_method(model, tmp_path, CheckpointError, "is missing from the checkpoint", tensor=name)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.block_sparse_moe.gate.weight",
        "model.embed_tokens.weight",
        "model.layers.0.post_attention_layernorm.weight",
    ],
)
def test_copied_tensors_must_be_finite(name: str, value: float, mixtral: Path, tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[name].view(-1)[7] = value

    model = faulty(mixtral, tmp_path, change=spoil)
    message = "(?:holds|has) NaN or infinite"  # a method that packs embeddings detects it
    assert_refused_by_every_method(model, tmp_path, InvalidTensorError, message, model / WEIGHTS, name)


def test_experts_must_be_finite(mixtral: Path, tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[EXPERT][3, 5] = float("-inf")

    model = faulty(mixtral, tmp_path, change=spoil)
    for method in every_method(tmp_path).values():
        with pytest.raises(InvalidTensorError, match=r"NaN or infinite|holds -inf at \[3, 5\]") as caught:
            moepack.compress(model, tmp_path / "out", method=method)
        # `rate` first reads a sample of whole projections, under their packed names.
        assert caught.value.tensor in (EXPERT, "model.layers.0.mlp.experts.gate_proj")
        assert caught.value.file in (str(model / WEIGHTS), str(model))
        assert not list(tmp_path.glob("out*"))


def test_experts_of_no_width_are_packed_or_refused_before_the_work(mixtral: Path, tmp_path: Path) -> None:
    def narrow(tensors: Tensors) -> None:
        for name in tensors:
            if ".experts." in name:
                cut = tensors[name][:, :0] if ".w2." in name else tensors[name][:0]
                tensors[name] = cut.contiguous()

    model = faulty(mixtral, tmp_path, {"intermediate_size": 0}, narrow)
    for name, method in every_method(tmp_path).items():
        out = tmp_path / name
        if method.packs_empty:
            moepack.compress(model, out, method=method)
            assert moepack.verify(out).ok
            continue
        with pytest.raises(UnsupportedModelError, match=r"(?:gate|up)_proj': has no values \(shape \[4, 0, 64\]\)"):
            moepack.compress(model, out, method=method)
        assert not list(tmp_path.glob(f"{name}*"))


def test_experts_that_vanish_are_warned_of(mixtral: Path, tmp_path: Path) -> None:
    """The smallest float16 scale is 6e-8: smaller experts would silently become zeros."""

    def shrink(tensors: Tensors) -> None:
        for name in experts(tensors, 1):
            tensors[name] = tensors[name] * 1e-7

    model = faulty(mixtral, tmp_path, change=shrink)
    for name, method in every_method(tmp_path).items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            moepack.compress(model, tmp_path / name, method=method)
        named = [str(each.message) for each in caught if each.category is MoepackWarning]
        vanish = name in ("finequant", "finequant with a text", "milo")  # the others have wider scales
        assert any(EXPERT in message for message in named) == vanish, name
        assert all(".experts.1." in message for message in named)


def test_constant_and_empty_values_come_back(mixtral: Path, tmp_path: Path) -> None:
    """Groups of one value, experts of zeros and rows of zeros cause no division by zero."""

    def flatten(tensors: Tensors) -> None:
        for name in experts(tensors, 0):
            tensors[name].zero_()
        for name in experts(tensors, 1):
            tensors[name].fill_(0.5)
        for name in experts(tensors, 2):
            tensors[name][1].zero_()

    model = faulty(mixtral, tmp_path, change=flatten)
    x = torch.arange(32)[None] % 200
    for name, method in every_method(tmp_path).items():
        with warnings.catch_warnings():
            warnings.simplefilter("error", MoepackWarning)
            report = moepack.compress(model, tmp_path / name, method=method)
        assert moepack.verify(report.path).ok
        with torch.no_grad():
            assert torch.isfinite(moepack.load(report.path)(x).logits).all()


def test_experts_that_no_token_visits_are_rounded_and_named(mixtral: Path, tmp_path: Path) -> None:
    """Their Hessians are zero, hence singular; so are all Hessians of fewer tokens than columns."""

    def close(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith("gate.weight"):
                tensors[name].zero_()  # top-2 of equal logits: the first two experts

    model = faulty(mixtral, tmp_path, change=close)
    for name, method in every_method(tmp_path).items():
        report = moepack.compress(model, tmp_path / name, method=method)
        assert moepack.verify(report.path).ok
        if requested(method) is not None:
            assert any("no calibration token reached experts" in note for note in report.notes), report.notes

"""Configurations that claim more than their files hold are rejected before anything is built or allocated."""

import json
import shutil
from pathlib import Path

import pytest

import moepack
from fault_support import assert_refused_by_every_method, faulty, refused
from moepack import CheckpointError, LoadError, UnsupportedModelError
from moepack.integrations import transformers
from moepack.integrations.loading import open_model
from moepack.methods.qmoe.ternary import Ternary

ABSURD = {
    "million layers": ({"num_hidden_layers": 10**6}, r"2 has no tensor", "num_hidden_layers is 1000000: too many"),
    "negative layers": (
        {"num_hidden_layers": -1},
        "no layer with experts",
        "num_hidden_layers is -1, not a whole number",
    ),
    "no number": (
        {"num_hidden_layers": "2"},
        "no valid number of layers",
        "num_hidden_layers is '2', not a whole number",
    ),
    "million experts": ({"num_local_experts": 10**6}, "config.json declares", "num_local_experts is 1000000: too"),
    "a lattice": (
        {"num_hidden_layers": 20, "num_local_experts": 10**4},
        "config.json declares",
        "20 layers of 10000 experts",
    ),
    "hidden size": ({"hidden_size": 10**9}, "hidden_size is 1000000000: too many", "hidden_size is 1000000000"),
    "negative size": ({"hidden_size": -64}, "hidden_size is -64", "hidden_size is -64"),
    "head": ({"head_dim": 10**13}, "head_dim is 10000000000000", "head_dim is 10000000000000"),
    "true": ({"vocab_size": True}, "vocab_size is True", "vocab_size is True"),
    "inside": ({"text_config": {"vocab_size": 1 << 60}}, "vocab_size is 11529215", "vocab_size is 11529215"),
}
"""Entries of config.json, the message for the checkpoint, and the message when a model is loaded."""


@pytest.mark.parametrize("case", ABSURD)
def test_absurd_sizes_are_refused_at_once(case: str, mixtral: Path, packed: Path, tmp_path: Path) -> None:
    config, of_checkpoint, of_model = ABSURD[case]
    model = faulty(mixtral, tmp_path, config)
    error = UnsupportedModelError if case == "negative layers" else CheckpointError
    assert_refused_by_every_method(model, tmp_path, error, of_checkpoint)
    for directory in (model, faulty(packed, tmp_path / "packed", config)):
        with refused(LoadError, of_model, directory / "config.json"):
            open_model(directory)


@pytest.mark.parametrize("top_k", [0, -1, 5])
def test_tokens_visit_one_expert_at_least_and_all_at_most(top_k: int, mixtral: Path, tmp_path: Path) -> None:
    model = faulty(mixtral, tmp_path, {"num_experts_per_tok": top_k})
    message = f"top-k is {top_k}, but a layer has 4 experts"
    assert_refused_by_every_method(model, tmp_path, CheckpointError, message, model / "config.json")


@pytest.mark.parametrize(
    "config", [{"rope_parameters": {"rope_type": "none of them", "rope_theta": 1e4}}, {"dtype": "float31"}]
)
def test_models_that_transformers_cannot_build_are_rejected(
    config: dict, mixtral: Path, packed: Path, tmp_path: Path
) -> None:
    model, message = faulty(mixtral, tmp_path, config), "transformers cannot build the model"
    assert_refused_by_every_method(model, tmp_path, UnsupportedModelError, message, model / "config.json")
    with refused(LoadError, "transformers cannot load it"):
        moepack.load(faulty(packed, tmp_path / "packed", config))


def test_a_model_of_another_width_than_its_tensors(mixtral: Path, packed: Path, tmp_path: Path) -> None:
    model = faulty(mixtral, tmp_path, {"vocab_size": 300})
    name = "model.embed_tokens.weight"
    message = r"has shape \[285, 64\], but the model expects \[300, 64\]"
    assert_refused_by_every_method(model, tmp_path, CheckpointError, message, model / "model.safetensors", name)
    large = faulty(packed, tmp_path / "packed", {"vocab_size": 10**6})
    with refused(LoadError, "the files hold", large / "config.json"):
        moepack.load(large)


def test_a_valid_config_with_additional_fields_is_accepted(mixtral: Path, tmp_path: Path) -> None:
    unused = {"num_nextn_predict_layers": None, "max_window_layers": 70, "window_size": 4096, "note": {"size": -1}}
    report = moepack.compress(faulty(mixtral, tmp_path, unused), tmp_path / "out", method=Ternary())
    assert json.loads((report.path / "config.json").read_text())["note"] == {"size": -1}
    shutil.rmtree(report.path)


def test_tied_weights_count_once(switch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder-decoder has its embedding in four places; a packed one has little else outside of packed modules."""
    out = moepack.compress(switch, tmp_path / "out", method="rate", bits_per_weight=4.0).path
    monkeypatch.setattr(transformers, "SMALL", 0)
    assert moepack.load(out).config.model_type == "switch_transformers"

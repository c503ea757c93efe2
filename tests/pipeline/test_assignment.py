"""Jobs with several methods, tensors packed elsewhere, and jobs whose checkpoint is repaired."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import moepack
import packed_support as support
from moepack.checkpoint import Checkpoint, describe
from moepack.errors import CalibrationError, InvalidTensorError, ResumeError
from moepack.format import PackedDirectory
from moepack.methods import CodeQuant, FineQuant, Method, Milo, PackedBytes, Qmoe
from moepack.methods.qmoe.ternary import Ternary
from moepack.pipeline import Assignment, compress
from moepack.pipeline.journal import Workspace
from stream_support import last_states, record_streams


def calibrated(text: Path, **settings: Any) -> Qmoe:
    return Qmoe(str(text), **{"samples": 6, "sequence_length": 64, **settings})


def chosen(model: Path, method: Any, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """The packed tensors of a method for the selected expert tensors."""
    layers = describe(Checkpoint.open(model)).layers
    names = [projection.packed_name for layer in layers for projection in layer.projections]
    return {name: method for name in names if wanted(name)}


def down(name: str) -> bool:
    return name.endswith("down_proj")


def runs(directory: Path) -> None:
    """Verify, load and run a packed directory."""
    assert moepack.verify(directory).ok
    model = moepack.load(directory, dtype=torch.float32)
    with torch.inference_mode():
        assert torch.isfinite(model(input_ids=torch.arange(20, 50)[None]).logits).all()


@pytest.mark.parametrize("other", [Ternary("dict16"), Milo(rounds=2, rank="uniform:4")])
def test_two_methods_without_calibration_share_a_job(other: Method, mixtral: Path, tmp_path: Path) -> None:
    main = FineQuant(bits=4, dense_bits="attention=8")
    compress(mixtral, tmp_path / "mixed", method=main, others=chosen(mixtral, other, down))
    runs(tmp_path / "mixed")
    compress(mixtral, tmp_path / "main", method=main)
    compress(mixtral, tmp_path / "other", method=other)
    mixed, first, second = (PackedDirectory.open(tmp_path / name) for name in ("mixed", "main", "other"))
    for name, data in mixed.tensors().items():
        assert (data == (second if down(name) else first).tensor(name)).all()
    details = {name: record.details for name, record in mixed.manifest.packed().items()}
    assert all(details[name].get("method") == (other.name if down(name) else None) for name in details)
    assert mixed.manifest.method == "finequant" and len(mixed.manifest.settings["assigned"]) == 2


@pytest.mark.parametrize("wanted", [down, lambda name: "gate_proj" in name, lambda name: "layers.0" in name])
def test_a_calibrated_and_an_uncalibrated_method_share_a_job(
    wanted: Callable[[str], bool], mixtral: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packed model computes the states to which the calibrated tensors were fitted."""
    streams = record_streams(monkeypatch)
    others = chosen(mixtral, FineQuant(bits=2), wanted)
    method = calibrated(text, bits="2", dense_bits="attention=8", minimum_tokens=10_000)
    report = compress(mixtral, tmp_path / "mixed", method=method, others=others)
    runs(tmp_path / "mixed")
    ids = method.request.load(Checkpoint.open(mixtral)).inputs
    expected = last_states(tmp_path / "mixed", ids, "exact")
    torch.testing.assert_close(streams[0].hidden.tokens, expected, rtol=1e-3, atol=1e-3)
    packed = PackedDirectory.open(tmp_path / "mixed").manifest.packed()
    assert {name for name, record in packed.items() if record.details.get("method")} == set(others)
    assert all(("relative_error" in record.details) == (name in others) for name, record in packed.items())
    seen = [record.module for record in packed.values() if "tokens" in record.details]
    assert len(seen) == len(set(seen)) == (1 if len(others) == 3 else 2)
    assert any(note.startswith(seen[0]) for note in report.notes)


def test_two_calibrated_methods_share_a_job_if_they_want_to_see_the_same(
    mixtral: Path, text: Path, tmp_path: Path
) -> None:
    coarse, fine = calibrated(text, bits_per_weight=1.5), calibrated(text, bits="2")
    compress(mixtral, tmp_path / "out", method=coarse, others=chosen(mixtral, fine, down))
    runs(tmp_path / "out")
    kinds = {name: record.kind for name, record in PackedDirectory.open(tmp_path / "out").manifest.packed().items()}
    assert all((kind == "ternary") != down(name) for name, kind in kinds.items())
    different = calibrated(text, samples=7)
    with pytest.raises(ValueError, match="same calibration set"):
        compress(mixtral, tmp_path / "other", method=coarse, others=chosen(mixtral, different, down))


def test_tensors_packed_elsewhere_are_taken_over_and_fed_on(mixtral: Path, text: Path, tmp_path: Path) -> None:
    """If another job of the same method supplies one layer, the other layers do not change."""
    compress(mixtral, tmp_path / "whole", method=calibrated(text))
    source = PackedDirectory.open(tmp_path / "whole")
    for layer in ("layers.0", "layers.1"):
        others = {
            name: PackedBytes(source.manifest.tensors[name].kind, data)
            for name, data in source.tensors().items()
            if layer in name
        }
        compress(mixtral, tmp_path / layer, method=calibrated(text), others=others)
        found = PackedDirectory.open(tmp_path / layer).tensors()
        assert all((found[name] == data).all() for name, data in source.tensors().items())


def test_a_mixed_job_resumes_to_the_same_bytes_and_another_mixture_is_another_job(
    mixtral: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixed(out: str, **settings: Any) -> Any:
        others = chosen(mixtral, FineQuant(**{"bits": 3, **settings}), down)
        return compress(mixtral, tmp_path / out, method=calibrated(text), others=others)

    mixed("whole")
    append = Workspace.append

    def die(self: Workspace, shard: Any) -> None:
        append(self, shard)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "append", die)
        with pytest.raises(KeyboardInterrupt):
            mixed("out")
    with pytest.raises(ResumeError, match="assigned"):
        mixed("out", bits=4)
    assert mixed("out").resumed_weights > 0
    assert support.contents(tmp_path / "out") == support.contents(tmp_path / "whole")


def test_meaningless_assignments_are_refused(mixtral: Path, tmp_path: Path) -> None:
    name, linear = "model.layers.0.mlp.experts.down_proj", "model.layers.0.self_attn.q_proj.weight"
    compress(mixtral, tmp_path / "packed", method="finequant")
    up = PackedDirectory.open(tmp_path / "packed").tensor("model.layers.0.mlp.experts.up_proj")
    for others, message in (
        ({"model.nothing": Ternary()}, "no tensor 'model.nothing'"),
        ({linear: Ternary()}, "does not pack 'model.layers.0.self_attn.q_proj.weight'"),
        ({name: PackedBytes("ternary", up)}, r"has shape .*, but the packed tensor has shape"),
        ({name: CodeQuant("text.txt", rotation="random")}, "changes the whole checkpoint"),
    ):
        with pytest.raises(ValueError, match=message):
            compress(mixtral, tmp_path / "out", method="finequant", others=others)
    assert [entry.name for entry in tmp_path.iterdir()] == ["packed"]
    compress(mixtral, tmp_path / "out", method="finequant", others={linear: FineQuant(dense_bits="attention=4")})
    runs(tmp_path / "out")


def test_the_methods_of_an_assignment_are_listed_once() -> None:
    main, other = Ternary(), FineQuant()
    assert Assignment(main, {"a": other, "b": other, "c": main}).methods == [main, other]


class Mending:
    """A model with a bad weight, and without."""

    def __init__(self, sound: Path, directory: Path, *names: str) -> None:
        self.path = Path(shutil.copytree(sound, directory))
        self.tensors = load_file(self.path / "model.safetensors")
        self.names, self.kept = names, {name: self.tensors[name].clone() for name in names}

    def save(self) -> None:
        save_file(self.tensors, self.path / "model.safetensors", {"format": "pt"})

    def break_(self, value: float = torch.nan) -> None:
        for name in self.names:
            self.tensors[name].view(-1)[7] = value
        self.save()

    def mend(self) -> None:
        self.tensors.update(self.kept)
        self.save()


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w2.weight"


def settings_of(kind: str, text: Path) -> Method:
    codequant = {"samples": 6, "sequence_length": 64, "steps": 1}
    return {
        "qmoe": lambda: calibrated(text, dense_bits="attention=8"),
        "codequant": lambda: CodeQuant(str(text), rotation="none", **codequant),
        "rotated": lambda: CodeQuant(str(text), rotation="random", **codequant),
        "finequant": lambda: FineQuant(dense_bits=8),
    }[kind]()


@pytest.mark.parametrize("kind", ["qmoe", "codequant", "rotated", "finequant"])
@pytest.mark.parametrize("name", [EXPERT, "model.layers.1.self_attn.o_proj.weight"])
def test_finished_blocks_outlive_the_repair_of_a_weight_that_is_nan(
    kind: str, name: str, mixtral: Path, text: Path, tmp_path: Path
) -> None:
    model = Mending(mixtral, tmp_path / "model", name)
    compress(mixtral, tmp_path / "whole", method=settings_of(kind, text))
    model.break_()
    for _ in range(2):
        with pytest.raises((InvalidTensorError, CalibrationError)):
            compress(model.path, tmp_path / "out", method=settings_of(kind, text))
        assert (tmp_path / "out.partial" / "journal.jsonl").exists() and not (tmp_path / "out").exists()
    model.mend()
    assert Checkpoint.open(model.path).fingerprint() == Checkpoint.open(mixtral).fingerprint()
    report = compress(model.path, tmp_path / "out", method=settings_of(kind, text))
    assert report.resumed_weights > 0.4 * report.expert_weights
    assert support.contents(tmp_path / "out") == support.contents(tmp_path / "whole")


def test_activations_that_are_nan_do_not_throw_away_finished_blocks(mixtral: Path, text: Path, tmp_path: Path) -> None:
    """A norm that is finite and too large: the model computes infinity in its last block."""
    model = Mending(mixtral, tmp_path / "model", "model.layers.1.post_attention_layernorm.weight")
    compress(mixtral, tmp_path / "whole", method=calibrated(text))
    model.break_(3e38)
    with pytest.raises(CalibrationError, match=r"model\.layers\.1"):
        compress(model.path, tmp_path / "out", method=calibrated(text))
    model.mend()
    assert compress(model.path, tmp_path / "out", method=calibrated(text)).resumed_weights > 0
    assert support.contents(tmp_path / "out") == support.contents(tmp_path / "whole")


@pytest.mark.parametrize(
    "changed",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.block_sparse_moe.experts.1.w1.weight",
    ],
)
def test_sources_of_finished_blocks_must_be_unchanged(changed: str, mixtral: Path, text: Path, tmp_path: Path) -> None:
    model = Mending(mixtral, tmp_path / "model", EXPERT)
    model.break_()
    with pytest.raises(InvalidTensorError):
        compress(model.path, tmp_path / "out", method=calibrated(text))
    before = support.contents(tmp_path / "out.partial")
    kept = model.tensors[changed].clone()
    model.tensors[changed].view(-1)[:9] += 1
    model.mend()
    with pytest.raises(ResumeError, match="another job"):
        compress(model.path, tmp_path / "out", method=calibrated(text))
    assert support.contents(tmp_path / "out.partial") == before
    model.tensors[changed] = kept
    model.mend()
    assert compress(model.path, tmp_path / "out", method=calibrated(text)).resumed_weights > 0
    compress(model.path, tmp_path / "whole", method=calibrated(text))
    assert support.contents(tmp_path / "out") == support.contents(tmp_path / "whole")


def test_a_change_that_the_fingerprint_misses_is_found_when_a_failed_job_continues(
    mixtral: Path, text: Path, tmp_path: Path
) -> None:
    model = Mending(mixtral, tmp_path / "model", EXPERT)
    model.break_()
    with pytest.raises(InvalidTensorError):
        compress(model.path, tmp_path / "out", method=calibrated(text))
    early = model.tensors["model.layers.0.block_sparse_moe.experts.1.w1.weight"].view(-1)
    before = Checkpoint.open(model.path).fingerprint()
    for start in range(0, len(early), 256):
        early[start : start + 9] += 1
        model.save()
        if Checkpoint.open(model.path).fingerprint() == before:
            break
        early[start : start + 9] -= 1
    with pytest.raises(InvalidTensorError):
        compress(model.path, tmp_path / "out", method=calibrated(text))
    model.mend()
    compress(model.path, tmp_path / "out", method=calibrated(text))
    compress(model.path, tmp_path / "whole", method=calibrated(text))
    assert support.contents(tmp_path / "out") == support.contents(tmp_path / "whole")


def test_a_change_costs_the_layers_that_follow_from_it_and_no_others(mixtral: Path, text: Path, tmp_path: Path) -> None:
    """Linear layers of the last block are finished when its experts fail; repaired ones are packed again."""
    attention = "model.layers.1.self_attn.k_proj.weight"
    model = Mending(mixtral, tmp_path / "model", EXPERT)
    model.break_()
    with pytest.raises(InvalidTensorError):
        compress(model.path, tmp_path / "out", method=calibrated(text, dense_bits="attention=8"))
    model.tensors[attention].view(-1)[:9] *= 2
    model.mend()
    report = compress(model.path, tmp_path / "out", method=calibrated(text, dense_bits="attention=8"))
    assert report.resumed_weights > 0
    compress(model.path, tmp_path / "whole", method=calibrated(text, dense_bits="attention=8"))
    assert support.contents(tmp_path / "out") == support.contents(tmp_path / "whole")


@pytest.mark.parametrize("rank", ["uniform:4", "kurtosis:4"])
def test_layers_for_which_something_else_is_decided_now_are_packed_again(
    rank: str, mixtral: Path, tmp_path: Path
) -> None:
    """Ranks by kurtosis also follow the repaired weights."""
    model, method = Mending(mixtral, tmp_path / "model", EXPERT), Milo(rounds=1, rank=rank)
    model.break_()
    with pytest.raises(InvalidTensorError):
        compress(model.path, tmp_path / "out", method=method)
    model.mend()
    assert compress(model.path, tmp_path / "out", method=method).resumed_weights > 0
    compress(model.path, tmp_path / "whole", method=method)
    assert support.contents(tmp_path / "out") == support.contents(tmp_path / "whole")

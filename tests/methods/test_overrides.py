"""Bits by name: patterns, precedence, near misses, and what every method makes of them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moepack
from moepack.checkpoint import Checkpoint, describe
from moepack.errors import OverrideError, ResumeError
from moepack.format import PackedDirectory
from moepack.methods import create
from moepack.methods.overrides import Named, Overrides, decide, is_by_name, split_bits
from moepack.pipeline import compress
from moepack.pipeline.estimate import estimate
from moepack.registry import open_tensor

EXPERTS = "model.layers.{}.mlp.experts"


def tensors() -> list[Named]:
    """Two layers of four experts, and a query projection in each that the method leaves unpacked."""
    found = []
    for layer in range(2):
        for part in ("gate_proj", "down_proj"):
            module = EXPERTS.format(layer)
            experts = tuple((f"{module}.{number}.{part}",) for number in range(4))
            found.append(Named(f"{module}.{part}", (), experts))
        found.append(Named(f"model.layers.{layer}.self_attn.q_proj.weight", ("attention",), packed=False))
    return found


def decided(text: str) -> dict[str, Any]:
    return decide(Overrides.parse(text), tensors())


def experts(text: str) -> dict[str, Any]:
    return {name: bits for name, bits in decided(text).items() if "experts" in name}


def test_the_first_pattern_that_matches_decides_and_16_bits_precede() -> None:
    bits = experts("down_proj=4,experts.{0..1}=8,layers.0=16,*=3")
    assert bits == {
        f"{EXPERTS.format(0)}.gate_proj": (16,) * 4,
        f"{EXPERTS.format(0)}.down_proj": (16,) * 4,
        f"{EXPERTS.format(1)}.gate_proj": (8, 8, 3, 3),
        f"{EXPERTS.format(1)}.down_proj": (4,) * 4,
    }
    assert experts("layers.1.mlp=4,*=16") == {
        **{f"{EXPERTS.format(1)}.{part}": (4,) * 4 for part in ("gate_proj", "down_proj")},
        **{f"{EXPERTS.format(0)}.{part}": (16,) * 4 for part in ("gate_proj", "down_proj")},
    }


def test_a_pattern_packs_what_the_method_leaves_out_only_if_it_matches_nothing_else() -> None:
    query = "model.layers.1.self_attn.q_proj.weight"
    assert query not in decided("layers.1=4") and query not in decided("*=4")
    for pattern in ("layers.1.self_attn", "layers.1.self_attn.q_proj", query, "layers.{1,1}.self_attn.?_proj"):
        assert decided(f"{pattern}=4") == {query: (4,)}
    assert set(decided("attention=8")) == {query, query.replace("1", "0")}


def test_components_match_whole_and_numbers_are_no_prefixes() -> None:
    names = [Named(f"model.layers.{number}.mlp.experts.up_proj", ()) for number in (1, 10, 11)]
    assert set(decide(Overrides.parse("layers.1=4"), names)) == {names[0].name}
    assert set(decide(Overrides.parse("layers.1?=4"), names)) == {names[1].name, names[2].name}
    with pytest.raises(OverrideError, match="'down=4' matches no tensor"):
        decided("down=4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("downproj=4", "the nearest names are down_proj"),
        ("layers.0.mlp.expert=4", r"the nearest names are layers\.0\.mlp\.experts"),
        ("experts.{2..5}=4", r"'experts\.4' of 'experts\.\{2\.\.5\}=4' matches no tensor"),
        ("*=3,down_proj=4", r"'down_proj=4' has no effect: .* decided by \*; put it first"),
        ("down_proj=4", ""),
        ("experts=4,layers.1.mlp.experts.down_proj=8", "has no effect"),
        ("layers.1=16,layers.1.mlp.experts.down_proj=8", "has no effect"),
    ],
)
def test_patterns_without_effect_are_errors_with_near_misses(text: str, message: str) -> None:
    if not message:
        decided(text)
        return
    with pytest.raises(OverrideError, match=message):
        decided(text)


@pytest.mark.parametrize(
    "text",
    ["down_proj", "down_proj=", "=4", "a=4,a=8", "a=0", "a=17", "a=x", "a=nan", "a.{0..=4", "a.{3..1}=4", "a..b=4"],
)
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(OverrideError):
        Overrides.parse(text)


def test_texts_files_and_mappings_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "bits.txt"
    file.write_text("# by name\ndown_proj: 4   # less\nexperts.{0,1}=8\n\n*=3\n")
    expected = Overrides.parse("down_proj=4,experts.{0,1}=8,*=3")
    for given in (str(file), f"@{file}", file, {"down_proj": 4, "experts.{0,1}": "8", "*": 3.0}, str(expected)):
        assert is_by_name(given) and split_bits(given) == (None, expected)
    assert split_bits("4,down_proj=8") == ("4", Overrides.parse("down_proj=8"))
    assert split_bits("{up_proj,down_proj}=8") == (None, Overrides.parse("{up_proj,down_proj}=8"))
    assert split_bits("4,{up_proj,down_proj}=8") == ("4", Overrides.parse("{up_proj,down_proj}=8"))
    for plain in (4, "4", "ternary", None):
        assert split_bits(plain) == (plain, Overrides())


def packed(out: Path) -> dict[str, Any]:
    """Verify and run a directory; return its packed records by name."""
    assert moepack.verify(out).ok
    model = moepack.load(out, dtype=torch.float32)
    with torch.inference_mode():
        assert torch.isfinite(model(input_ids=torch.arange(20, 50)[None]).logits).all()
    return dict(PackedDirectory.open(out).manifest.packed())


def rate(record: Any) -> float:
    return 8 * record.nbytes / math.prod(record.shape)


FIXED: list[tuple[str, str, dict[str, Any]]] = [
    ("finequant", "bits", {"calibration": "none"}),
    ("finequant", "bits", {"calibration": "text"}),
    ("milo", "bits", {"calibration": "none", "rounds": 2}),
    ("codequant", "bits", {"calibration": "text", "rotation_steps": 4}),
]


@pytest.mark.parametrize(("method", "key", "settings"), FIXED)
def test_methods_of_fixed_bits_give_each_tensor_its_own(
    method: str, key: str, settings: dict[str, Any], mixtral: Path, text: Path, tmp_path: Path
) -> None:
    if settings["calibration"] == "text":
        settings = {**settings, "calibration": str(text), "samples": 2, "sequence_length": 32}
    compress(
        mixtral, tmp_path / "out", method=method, bits="down_proj=2,self_attn.q_proj=3,layers.1=16,*=4", **settings
    )
    records = packed(tmp_path / "out")
    bits = {name: record.details["bits"] for name, record in records.items() if "layers.0" in name}
    assert bits[f"{EXPERTS.format(0)}.down_proj"] == 2
    assert bits["model.layers.0.self_attn.q_proj.weight"] == 3
    assert {own for name, own in bits.items() if "gate_proj" in name or "up_proj" in name} == {4}
    assert not any("layers.1." in name for name in records)
    assert not any("method" in record.details for record in records.values())


def test_qmoe_gives_experts_rates_and_linear_layers_bits(mixtral: Path, text: Path, tmp_path: Path) -> None:
    settings = {"calibration": str(text), "samples": 2, "sequence_length": 32}
    compress(mixtral, tmp_path / "out", method="qmoe", bits="down_proj=2,self_attn=8", **settings)
    records = packed(tmp_path / "out")
    assert records[f"{EXPERTS.format(0)}.down_proj"].details["bits"] == 2
    assert records[f"{EXPERTS.format(0)}.up_proj"].kind == "ternary"
    assert records["model.layers.1.self_attn.v_proj.weight"].details["bits"] == 8


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("prefer", ["quality", "speed"])
def test_auto_meets_the_size_around_given_rates(
    calibrated: bool, prefer: str, qwen3_moe: Path, text: Path, tmp_path: Path
) -> None:
    model, out = qwen3_moe, tmp_path / "out"
    own = {"calibration": str(text), "samples": 2, "sequence_length": 32} if calibrated else {"calibration": "none"}
    given = {"down_proj": 5, "q_proj": 7, "layers.0.self_attn.o_proj": 16}
    whole = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    compress(model, out, method="auto", size=int(whole * 0.55), prefer=prefer, bits=given, **own)
    records = packed(out)
    assert sum(file.stat().st_size for file in out.glob("*.safetensors")) <= int(whole * 0.55)
    for name, record in records.items():
        for part, bits in (("down_proj", 5), ("q_proj", 7)):
            if part in name:
                assert rate(record) == pytest.approx(bits, rel=0.06), name
    assert "model.layers.0.self_attn.o_proj.weight" not in records


def errors(model: Path, out: Path, name: str) -> torch.Tensor:
    """The relative squared error of each expert of a packed tensor."""
    part = next(
        part
        for layer in describe(Checkpoint.open(model)).layers
        for part in layer.projections
        if part.packed_name == name
    )
    values = torch.from_numpy(open_tensor(PackedDirectory.open(out).tensor(name)).dequantize())
    originals = torch.stack([part.expert(number).float() for number in range(part.shape[0])])
    return (values - originals).square().sum((1, 2)) / originals.square().sum((1, 2))


@pytest.mark.parametrize("method", ["auto", "rate"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_experts_of_one_tensor_have_rates_of_their_own(
    method: str, calibrated: bool, mixtral: Path, text: Path, tmp_path: Path
) -> None:
    own = {"calibration": str(text), "samples": 2, "sequence_length": 32} if calibrated else {"calibration": None}
    size = {"auto": {"ratio": 0.4}, "rate": {"bits_per_weight": 4.0}}[method]
    own = own if method == "rate" or calibrated else {"calibration": "none"}
    compress(mixtral, tmp_path / "out", method=method, bits="experts.{0..1}=6,experts=3", **size, **own)
    name = f"{EXPERTS.format(0)}.up_proj"
    record, lost = packed(tmp_path / "out")[name], errors(mixtral, tmp_path / "out", name)
    experts = record.shape[0]
    assert rate(record) == pytest.approx((2 * 6 + (experts - 2) * 3) / experts, rel=0.06)
    assert lost[:2].max() < lost[2:].min() / 8  # three bits are a factor of 64 in theory


EVERY: list[tuple[str, dict[str, Any]]] = [
    ("finequant", {"calibration": "none", "dense_bits": 4}),
    ("finequant", {"calibration": "text", "bits_per_weight": 6.5, "group_size": "budget"}),
    ("milo", {"calibration": "none", "rounds": 2}),
    ("milo", {"calibration": "none", "rounds": 2, "memory_budget": 700_000}),
    ("codequant", {"calibration": "text", "rotation_steps": 4}),
    ("qmoe", {"calibration": "text", "dense_bits": 4}),
    ("rate", {"calibration": "text", "bits_per_weight": 5.0}),
    ("auto", {"calibration": "text"}),
]


@pytest.mark.parametrize(("method", "settings"), EVERY)
def test_experts_of_one_layer_may_differ_with_every_method(
    method: str, settings: dict[str, Any], qwen3_moe: Path, text: Path, tmp_path: Path
) -> None:
    """Tensors whose experts differ are coded, which gives each expert its own bits in one tensor."""
    if settings["calibration"] == "text":
        settings = {**settings, "calibration": str(text), "samples": 2, "sequence_length": 32}
    bits = "down_proj=4,experts.{0..1}=8,layers.0=16,*=" + ("5" if method in ("auto", "rate") else "3")
    report = compress(qwen3_moe, tmp_path / "out", method=method, bits=bits, **settings)
    records = packed(tmp_path / "out")
    assert not any("layers.0." in name for name in records)
    name = f"{EXPERTS.format(1)}.up_proj"
    record = records[name]
    assert record.kind == "coded" and record.shape[0] == 4
    assert rate(record) == pytest.approx((2 * 8 + 2 * int(bits[-1])) / 4, rel=0.08)
    down = records[f"{EXPERTS.format(1)}.down_proj"]
    assert down.details.get("bits", 4) == 4 and (down.kind != "coded" or rate(down) == pytest.approx(4, rel=0.08))
    assert moepack.verify(tmp_path / "out")
    if "memory_budget" in settings:
        assert report.packed_bytes <= settings["memory_budget"]


REFUSED = [
    (
        "finequant",
        {"calibration": "none"},
        "experts=2.5",
        "cannot give a tensor 2.5 bits: it gives 2, 3, 4 or 8.*rate 0.4 to 8",
    ),
    (
        "finequant",
        {"calibration": "none"},
        "experts.0=8",
        "give bits to only some of its experts; .* `\\*=3` as the last",
    ),
    ("milo", {"calibration": "none"}, "experts.0=9,*=3", "cannot give a tensor 9 bits: it gives 0.4 to 8"),
    (
        "finequant",
        {"calibration": "none"},
        "embed_tokens=4",
        "does not pack this tensor .embedding.; methods that give bits by name: auto 0.4 to 8; rate 0.4 to 8$",
    ),
    ("codequant", {"calibration": "built-in"}, "experts=8", "gives 2, 3 or 4"),
    ("qmoe", {"calibration": "built-in"}, "experts=0.3", "gives 0.4 to 2 for experts"),
    ("qmoe", {"calibration": "built-in"}, "experts=9", "gives 0.4 to 8"),
    ("floe", {"calibration": "built-in"}, "experts=4", "floe has no bits by name; methods that give bits by name"),
    ("auto", {"calibration": "none"}, "experts=9", "gives 0.4 to 8, and 16 leaves a tensor unpacked"),
    ("auto", {"calibration": "none"}, "down_proj=16", "leave it unpacked, but not .*gate_proj'; .* together"),
    ("auto", {"calibration": "none"}, "experts.0=16", "leave only some of its experts unpacked"),
    ("auto", {"calibration": "none"}, "experts=16", "leave all experts of the model unpacked"),
    (
        "rate",
        {"bits_per_weight": 2, "calibration": "none"},
        "experts=8",
        "leave 0.00 bits per weight for the other tensors",
    ),
]


@pytest.mark.parametrize(("method", "settings", "bits", "message"), REFUSED)
def test_bits_that_a_method_cannot_give_are_typed_errors(
    method: str, settings: dict[str, Any], bits: str, message: str, mixtral: Path, tmp_path: Path
) -> None:
    with pytest.raises(OverrideError, match=message):
        compress(mixtral, tmp_path / "out", method=method, bits=bits, **settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "switch_transformers", "granitemoe"])
def test_names_of_every_layout_are_found(family: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    model = saved(family)
    layers = describe(Checkpoint.open(model)).layers
    last, first = layers[-1].projections[-1], layers[0].projections[0]
    source, stacked = first.parts[0].tensor.removesuffix(".weight"), bool(first.parts[0].index)
    bits = {last.packed_name: 2, **({source: 8} if stacked else {}), "*": 4}
    compress(model, tmp_path / "out", method="finequant", calibration="none", bits=bits)
    records = PackedDirectory.open(tmp_path / "out").manifest.packed()
    assert records[last.packed_name].details["bits"] == 2
    assert records[first.packed_name].details["bits"] == (8 if stacked else 4)


def test_the_plan_follows_the_bits(mixtral: Path, tmp_path: Path) -> None:
    method = create("finequant", calibration="none", bits="down_proj=8,layers.1=16,*=2")
    plan = estimate(mixtral, tmp_path / "out", method)
    compress(mixtral, tmp_path / "out", method=method)
    records = PackedDirectory.open(tmp_path / "out").manifest.packed().values()
    (experts,) = plan.parts
    assert experts.exact and experts.after == sum(record.nbytes for record in records)
    assert plan.settings["overrides"] == "down_proj=8,layers.1=16,*=2"


def test_a_resumed_job_sees_other_bits(mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moepack.pipeline import job

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job, "_write_dense", fail)
        with pytest.raises(KeyboardInterrupt):
            compress(mixtral, tmp_path / "out", method="finequant", calibration="none", bits="down_proj=8")
    with pytest.raises(ResumeError, match="overrides=down_proj=8"):
        compress(mixtral, tmp_path / "out", method="finequant", calibration="none", bits="down_proj=4")
    report = compress(mixtral, tmp_path / "out", method="finequant", calibration="none", bits="down_proj=8")
    assert report.resumed_weights > 0
    compress(mixtral, tmp_path / "whole", method="finequant", calibration="none", bits="down_proj=8")
    assert (tmp_path / "out" / "moepack.json").read_bytes() == (tmp_path / "whole" / "moepack.json").read_bytes()

"""Architectures of the installed transformers: a sample of each layout of experts, from a tiny model to its export.

`moepack models` tests the whole table.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from census_support import IDS, KNOWN, skip_unknown
from moepack import Checkpoint, CheckpointError, UnsupportedModelError, compress, describe, load, verify
from moepack.calibration import Calibrator
from moepack.calibration.buffer import ListBuffer
from moepack.calibration.skeleton import Skeleton
from moepack.calibration.stacks import Stack
from moepack.census import check
from moepack.census.tiny import tiny_model
from moepack.census.trial import EXPORTED, followed
from moepack.checkpoint.experts import form_of
from moepack.cli import app
from moepack.decoding.families import FAMILIES
from moepack.export import export
from moepack.format import PackedDirectory
from moepack.integrations.diagnosis import who_decodes
from moepack.methods.finequant import FineQuant
from moepack.methods.rate import Rate
from places import ROOT

SAMPLE = {
    "aria": "transposed experts in a model that reads images",
    "dbrx": "stacked rows",
    "deepseek_v4": "clamped SwiGLU, every tensor renamed",
    "ernie4_5_vl_moe": "experts of text and images in one list",
    "gemma4": "GELU",
    "gpt_oss": "transposed, interleaved, biases",
    "granitemoehybrid": "a setting that is infinite",
    "inkling_text": "rows of gate and up taking turns on disk",
    "jetmoe": "experts in the attention, rows sorted by the caller",
    "llama4": "all experts on scaled rows",
    "longcat_flash": "identity experts",
    "nemotron_h": "ReLU squared, no gate",
    "openai_privacy_filter": "token classification",
    "qwen3_next": "gated delta attention",
    "qwen3_vl_moe": "transposed on disk",
    "step3p7": "a norm of its own clamp, outside the interface",
    "switch_transformers": "encoder and decoder",
}


@pytest.mark.parametrize("model_type", SAMPLE, ids=SAMPLE.get)
def test_a_layout_works(model_type: str) -> None:
    skip_unknown(model_type)
    outcome = check((model_type,))
    assert outcome.works and outcome.followed is not None, outcome


@pytest.mark.parametrize("model_type", ["gpt_oss", "nemotron_h", "llama4"])
def test_a_layout_takes_other_methods(model_type: str, tmp_path: Path) -> None:
    """The packed model of `rate` is close to the original, and closer with more bits."""
    skip_unknown(model_type)
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path / "source")
    ids = torch.arange(3, 19)[None]
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
        errors = []
        for bits in (3.0, 5.5):
            compress(tmp_path / "source", tmp_path / f"{bits}", method=Rate(bits, roles="none"))
            found = load(tmp_path / f"{bits}", dtype="float32", mode="exact")(input_ids=ids).logits
            errors.append(float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median()))
    assert errors[1] < errors[0] < 1


def test_packed_experts_compute_the_same_as_the_module(tmp_path: Path) -> None:
    """Biases, clamps and interleaving equal transformers' own module up to rounding, with sentinels."""
    skip_unknown("gpt_oss")
    model = tiny_model("gpt_oss")
    model.save_pretrained(tmp_path / "source")
    compress(tmp_path / "source", tmp_path / "packed", method=FineQuant(bits=8))
    packed = load(tmp_path / "packed", dtype="float32", mode="exact")
    path = next(name for name, module in model.named_modules() if form_of(module) is not None)
    original, twin = model.get_submodule(path), packed.get_submodule(path)
    matrices = [torch.from_numpy(twin.matrix(name).dequantize("float32")) for name in twin.projections]
    with torch.no_grad():
        original.gate_up_proj[:, :, 0::2], original.gate_up_proj[:, :, 1::2] = (m.mT for m in matrices[:2])
        original.down_proj.copy_(matrices[2].mT)
        x, index, weights = torch.randn(5, 32), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
        torch.testing.assert_close(twin(x, index, weights), original(x, index, weights), rtol=1e-4, atol=1e-4)
        nowhere = twin(x, torch.full((5, 2), 4), weights)
    assert not nowhere.any()


@pytest.mark.parametrize(
    ("architecture", "by"), [("glm4_moe", "decoded by moepack's decoder"), ("dots1", "decoded by transformers (")]
)
def test_doctor_names_the_decoder_of_a_model(architecture: str, by: str, tmp_path: Path) -> None:
    saved(architecture, tmp_path / "source")
    assert who_decodes(tmp_path / "source").startswith(by)
    compress(tmp_path / "source", tmp_path / "packed", method=FineQuant(bits=8))
    answer = who_decodes(tmp_path / "packed")
    assert answer.startswith(by) and ("dots1" in answer) == (architecture == "dots1")


LISTED = re.findall(r"^\| `(\w+)` \|.*\| core \|", (ROOT / "docs/models.md").read_text(), re.M)


def test_the_page_lists_every_family_of_the_core() -> None:
    assert set(LISTED) == set(FAMILIES)


@pytest.mark.parametrize("model_type", LISTED)
def test_the_core_decodes_the_listed_architectures(model_type: str) -> None:
    skip_unknown(model_type)
    outcome = check((model_type,))
    assert outcome.works and outcome.decoded == "core", outcome


def test_the_command_prints_a_line_or_the_page() -> None:
    found = CliRunner().invoke(app, ["models", "mixtral", "--json"])
    assert found.exit_code == 0 and json.loads(found.stdout)["verdict"] == "works"
    page = CliRunner().invoke(app, ["models", "mixtral", "--markdown"]).stdout
    assert "1 of the 1 architectures" in page and "| `mixtral` | works | gated |" in page
    assert CliRunner().invoke(app, ["models", "no_such_model"]).exit_code == 2


def refused(directory: Path, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        describe(Checkpoint.open(directory))


def saved(architecture: str, path: Path, **config: object) -> Path:
    tiny_model(architecture).save_pretrained(path)
    settings = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(settings))
    return path


def test_experts_that_two_modules_share_are_refused(tmp_path: Path) -> None:
    skip_unknown("diffusion_gemma")
    refused(saved("diffusion_gemma", tmp_path), "two of its modules share their experts")


def test_a_model_that_reads_images_without_experts_is_refused(tmp_path: Path) -> None:
    config = transformers.LlavaConfig(
        text_config={
            "model_type": "llama",
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 1,
            "vocab_size": 64,
        },
        vision_config={"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32},
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    refused(tmp_path, "'llava' is not supported: the model has no experts")


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    path = saved("glm4_moe", tmp_path, model_type="made_up", auto_map={"AutoModelForCausalLM": "code.Model"})
    (path / "code.py").write_text("raise SystemExit('ran')")
    refused(path, "does not support this architecture; code that comes with a checkpoint is never run")


@pytest.mark.parametrize("spelling", ["Infinity", {"__float__": "Infinity"}])
def test_infinite_settings(spelling: object, tmp_path: Path) -> None:
    skip_unknown("granitemoehybrid")
    limit = float("inf") if spelling == "Infinity" else spelling
    path = saved("granitemoehybrid", tmp_path, time_step_limit=[0.0, limit])
    assert len(describe(Checkpoint.open(path)).layers) == 2


def test_a_setting_that_is_not_a_number_is_rejected(tmp_path: Path) -> None:
    refused(saved("glm4_moe", tmp_path, hidden_size=float("nan")), "transformers cannot build it")


PREDICTION = pytest.mark.parametrize(
    ("model_type", "layer", "extra"),
    [("glm4_moe", "model.layers.1", "model.layers.2"), ("qwen3_next", "model.layers.0", "mtp.layers.0")],
)
"""A layer of multi-token prediction behind the last, as in GLM-4.5, or under `mtp`, as in Qwen3-Next and MiMo."""


def with_prediction(model_type: str, layer: str, extra: str, source: Path) -> dict[str, torch.Tensor]:
    """Write a model with such a layer, converted from another one; return the layer's tensors."""
    skip_unknown(model_type)
    saved(model_type, source)
    tensors = load_file(source / "model.safetensors")
    added = {f"{extra}{name.removeprefix(layer)}": x + 1 for name, x in tensors.items() if name.startswith(f"{layer}.")}
    save_file(tensors | added, source / "model.safetensors", {"format": "pt"})
    return added


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in directory.glob("*.safetensors") for name, x in load_file(file).items()}


@PREDICTION
def test_multi_token_prediction_is_kept(model_type: str, layer: str, extra: str, tmp_path: Path) -> None:
    kept = with_prediction(model_type, layer, extra, tmp_path / "source")
    report = compress(tmp_path / "source", tmp_path / "packed", method=FineQuant(bits=8))
    assert any(f"{extra}: " in note and "are kept unchanged" in note for note in report.notes)
    found = tensors_of(tmp_path / "packed")
    assert len(kept) > 8 and all(torch.equal(found[name], x) for name, x in kept.items())
    assert load(tmp_path / "packed")(input_ids=IDS).logits.isfinite().all()


@PREDICTION
def test_multi_token_prediction_is_packed_on_request(model_type: str, layer: str, extra: str, tmp_path: Path) -> None:
    """It is packed with any method, invisible to the model, and exported to its place."""
    added = with_prediction(model_type, layer, extra, tmp_path / "source")
    for name, bits in ("kept", None), ("packed", 8):
        compress(tmp_path / "source", tmp_path / name, method=Rate(4.0, roles="none"), mtp_bits=bits)
    kept, packed = (load(tmp_path / name)(input_ids=IDS).logits for name in ("kept", "packed"))
    assert torch.equal(kept, packed)
    assert verify(tmp_path / "packed").ok
    records = PackedDirectory.open(tmp_path / "packed").manifest.packed().values()
    assert {record.projection for record in records if record.beyond} == {"gate_proj", "up_proj", "down_proj"}
    export(tmp_path / "packed", tmp_path / "plain")
    values = tensors_of(tmp_path / "plain")
    for name, x in added.items():
        error = (values[name].float() - x.float()).abs().max()
        assert error <= 0.01 * x.float().abs().max() if ".experts." in name else error == 0, name


def test_multi_token_prediction_that_is_not_there_is_not_packed(tmp_path: Path) -> None:
    saved("glm4_moe", tmp_path / "source")
    with pytest.raises(ValueError, match="no multi-token-prediction experts"):
        compress(tmp_path / "source", tmp_path / "packed", method=FineQuant(bits=8), mtp_bits=8)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    path = saved("qwen3_next" if "qwen3_next" in KNOWN else "glm4_moe", tmp_path)
    tensors = load_file(path / "model.safetensors")
    gone = next(name for name in tensors if ".experts.3.up_proj" in name)
    del tensors[gone]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"config.json declares 4 experts, but the checkpoint has 3 tensors"):
        describe(Checkpoint.open(path))


FOLLOWED = {
    "beam": "a norm behind the experts",
    "glm_moe_dsa": "what a block passes on beside hidden states",
    "kimi_linear": "tensors that are joined when they are loaded",
    "mistral_large4": "keys that blocks share",
    "muse_spark": "a norm of each expert's output",
}
"""Blocks missing in the sample of layouts."""


@pytest.mark.parametrize("model_type", FOLLOWED, ids=FOLLOWED.get)
def test_calibration_computes_the_same_as_the_model(model_type: str, tmp_path: Path) -> None:
    skip_unknown(model_type)
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    assert followed(tmp_path, model) < 1e-6


TEXT = "the quick brown fox jumps over the lazy dog while five wizards box and a sphinx of black quartz judges " * 3


def tokenizer() -> Any:
    """A tokenizer of single letters."""
    known = {token: number for number, token in enumerate(("<pad>", "<s>", "</s>", " ", *ascii_lowercase))}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


class Whole:
    """An iterator that is read to its end when it is closed."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __next__(self) -> Any:
        return next(self._items)

    def close(self) -> None:
        """Passes the states through the last block, which no method requests."""
        assert next(self._items, None) is None


@pytest.mark.parametrize("model_type", ["gpt_oss", "jetmoe", "llama4", "longcat_flash", "nemotron_h"])
def test_a_method_sees_the_states_of_the_packed_model(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a calibrated method on each form of experts, the compressed stream equals the packed model's states."""
    skip_unknown(model_type)
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path / "source")
    tokenizer().save_pretrained(tmp_path / "source")
    (tmp_path / "text.txt").write_text(TEXT)
    made: list[tuple[Calibrator, torch.Tensor]] = []
    forget = Calibrator.forget

    def end(calibrator: Calibrator) -> None:
        """Keeps the states after the last block, before the calibrator drops them."""
        made.append((calibrator, calibrator.hidden.tokens.clone()))
        forget(calibrator)

    layers = Calibrator.layers
    monkeypatch.setattr(Calibrator, "layers", lambda *given: Whole(layers(*given)))
    monkeypatch.setattr(Calibrator, "forget", end)
    method = Rate(5.0, roles="none", calibration=str(tmp_path / "text.txt"), samples=8, sequence_length=32)
    compress(tmp_path / "source", tmp_path / "packed", method=method)
    ((calibrator, states),) = made
    packed, stack, seen = load(tmp_path / "packed", dtype="float32", mode="exact"), calibrator.stack, []
    last = getattr(packed.get_submodule(stack.name), stack.list_name)[-1]
    last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    last.register_forward_hook(lambda _, inputs, output: seen.append(output))
    with torch.inference_mode():
        packed(input_ids=calibrator.samples.inputs)
    before, after = (each.flatten(0, 1) for each in seen)
    errors = (states - after).norm(dim=-1) / (after - before).norm(dim=-1)
    assert float(errors.median()) < 1e-4


def test_blocks_that_read_more_than_hidden_states_are_refused(tmp_path: Path) -> None:
    """Arguments that depend on hidden states of earlier blocks are computed from these, not from the embeddings."""
    checkpoint = Checkpoint.open(saved("mixtral", tmp_path))
    skeleton = Skeleton(checkpoint, describe(checkpoint), dtype=torch.float32, device=torch.device("cpu"))
    stack = Stack(skeleton, "model", "layers", batch=2)
    forward = type(stack.module).forward

    def passes_on(self: Any, **inputs: Any) -> Any:
        """Passes the first block's value to the second."""
        call, first = self.layers[1].forward, self.layers[0].forward
        states: list[torch.Tensor] = []

        def note(hidden: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            states.append(first(hidden, *arguments, **named))
            return states[0]

        self.layers[0].forward = note
        self.layers[1].forward = lambda hidden, **named: call(hidden, earlier=states[0], **named)
        return forward(self, **inputs)

    stack.module.forward = MethodType(passes_on, stack.module)
    with pytest.raises(UnsupportedModelError, match="depend on more than"):
        stack.embed(IDS, lambda width: ListBuffer([12] * 3, width))


def test_llama4_with_several_experts_a_token_is_not_followed(tmp_path: Path) -> None:
    skip_unknown("llama4")
    checkpoint = Checkpoint.open(saved("llama4", tmp_path))
    described = describe(checkpoint)
    skeleton = Skeleton(checkpoint, described, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="one expert per token"):
        skeleton.recorders[described.layers[0].name](torch.ones(4 * 5, 32))


def image() -> tuple[dict[str, Any], dict[str, torch.Tensor], str]:
    """Settings, inputs with an image of 4 x 4 patches, and the positions of the image."""
    own = {"image_token_id": 60, "vision_start_token_id": 59, "vision_config": {"deepstack_visual_indexes": [0]}}
    ids = torch.tensor([[5, 59, 60, 60, 60, 60, 7, 8]])
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == 60).int(), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return own, inputs | {"pixel_values": torch.randn(16, 3 * 2 * 16 * 16)}, "pixel_values"


def sound() -> tuple[dict[str, Any], dict[str, torch.Tensor], str]:
    """Settings, inputs with a second of sound, and the positions of the sound."""
    own = {"audio_token_id": 60, "audio_start_token_id": 59, "audio_config": {"output_dim": 32}}
    ids = torch.tensor([[5, 59, *[60] * 13, 7, 8]])
    inputs = {"input_ids": ids, "feature_attention_mask": torch.ones(1, 100, dtype=torch.long)}
    return own, inputs | {"input_features": torch.randn(1, 128, 100)}, "input_features"


@pytest.mark.parametrize(("model_type", "make"), [("qwen3_vl_moe", image), ("qwen3_omni_moe_thinker", sound)])
def test_images_and_sound_pass_through_a_packed_model(model_type: str, make: Any, tmp_path: Path) -> None:
    """Towers are unchanged, and their outputs enter the packed language model as in its export."""
    skip_unknown(model_type)
    torch.manual_seed(0)
    own, inputs, media = make()
    model = tiny_model(model_type, own=own)
    model.save_pretrained(tmp_path / "source")
    compress(tmp_path / "source", tmp_path / "packed", method=FineQuant(bits=8))
    export(tmp_path / "packed", tmp_path / "plain")
    packed = load(tmp_path / "packed", dtype="float32", mode="exact")
    plain = type(model).from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    with torch.inference_mode():
        found, expected = (each(**inputs).logits for each in (packed, plain))
        other = packed(**inputs | {media: -inputs[media]}).logits
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(errors.median()) < EXPORTED
    assert float(((other - found).norm(dim=-1) / found.norm(dim=-1))[0, -1]) > EXPORTED

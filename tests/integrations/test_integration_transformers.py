"""Packed directories through transformers: every architecture, and every failure mode."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers

import moepack
from moepack import CorruptionError, LoadError, UnsupportedModelError
from moepack.format import FileRecord, PackedDirectory
from moepack.integrations import register
from moepack.methods.qmoe.ternary import Ternary
from moepack.modules.experts import PackedExperts, PackedSwitchExperts
from runtime_support import (
    ARCHITECTURES,
    SWITCH,
    expert_weights,
    experts_modules,
    inputs,
    logits,
    python,
    tiny_model,
    write_packed,
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A function from an architecture to (model, directory of it packed in the test format)."""
    made = {}

    def make(architecture):
        if architecture not in made:
            model = tiny_model(architecture)
            made[architecture] = model, write_packed(model, tmp_path_factory.mktemp("packed") / architecture)
        return made[architecture]

    return make


@pytest.fixture
def mixtral_copy(packed, tmp_path):
    """A separate directory to damage."""
    return shutil.copytree(packed("mixtral")[1], tmp_path / "copy")


def edit_config(directory, change):
    """Change config.json and the manifest, so that the change itself is rejected."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    change(config)
    data = json.dumps(config).encode()
    file.write_bytes(data)
    manifest = PackedDirectory.open(directory).manifest
    files = {**manifest.files, "config.json": FileRecord.of(data)}
    (directory / "moepack.json").write_bytes(dataclasses.replace(manifest, files=files).to_bytes())


def source_of(directory):
    return directory.with_name(directory.name + "-source")


def auto_class(architecture):
    return transformers.AutoModelForSeq2SeqLM if architecture == SWITCH else transformers.AutoModelForCausalLM


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_loaded_model_is_the_original(packed, architecture):
    model, directory = packed(architecture)
    loaded, report = auto_class(architecture).from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    assert not loaded.training
    assert [type(module) for _, module in experts_modules(loaded)] == [
        PackedSwitchExperts if architecture == SWITCH else PackedExperts for _ in experts_modules(model)
    ]
    expected = logits(model)
    assert (logits(loaded) - expected).abs().max() <= 1e-5 * expected.abs().max()


def dequantize_experts(model, code):
    """Replace a model's expert weights by their values after ternary packing."""
    for _, module in experts_modules(model):
        for name, weight in expert_weights(module).items():
            codes, levels = moepack.quantize_ternary(weight.detach())
            values = moepack.encode_ternary(codes, levels=levels, code=code).dequantize(torch.float32)
            _assign(module, name, values)
    return model


def _assign(module, name, values):
    with torch.no_grad():
        if name in ("wi", "wo"):
            for expert, value in zip(module.values(), values, strict=True):
                getattr(expert, name).weight.copy_(value)
        elif name == "down_proj":
            module.down_proj.copy_(values)
        else:
            module.gate_up_proj.chunk(2, dim=1)[name == "up_proj"].copy_(values)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("code", ["fsv8", "dict16"])
def test_ternary_experts_equal_their_dequantized_weights(architecture, code, tmp_path, monkeypatch):
    """In the checkpoint's own scales, in which the expected weights are quantized."""
    monkeypatch.setattr(Ternary, "needs_balance", False)
    model = tiny_model(architecture)
    loaded = moepack.load(write_packed(model, tmp_path / "packed", Ternary(code)), dtype="float32")
    original = logits(model)
    expected = logits(dequantize_experts(model, code))
    assert (expected - original).abs().max() > 0.05 * original.abs().max(), "the experts do not matter in this model"
    assert (logits(loaded) - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (logits(loaded, tokens=1) - logits(model, tokens=1)).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generate(packed, architecture):
    model, directory = packed(architecture)
    prompt = inputs(model, tokens=9, batch=2)["input_ids"]
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(
        moepack.load(directory, dtype="float32").generate(prompt, **settings), model.generate(prompt, **settings)
    )


def test_load_uses_the_checkpoints_dtype_by_default(packed):
    _, directory = packed("mixtral")
    assert moepack.load(directory).dtype == torch.float32
    half = moepack.load(directory, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert {buffer.dtype for _, module in experts_modules(half) for buffer in module.buffers()} == {torch.uint8}
    assert logits(half).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="float32, bfloat16, float16"):
        moepack.load(directory, dtype="int3")


def test_bfloat16_stays_close(packed):
    """No further from the float32 model than the original in bfloat16 (both sometimes change experts)."""
    model, directory = packed("mixtral")
    expected = logits(model)
    error = (logits(moepack.load(directory, dtype="bfloat16")).float() - expected).abs().mean()
    original = transformers.AutoModelForCausalLM.from_pretrained(source_of(directory), dtype=torch.bfloat16)
    assert 0 < error < 1.3 * (logits(original).float() - expected).abs().mean()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(packed, attention):
    model, directory = packed("qwen3_moe")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=attention
    )
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)


def test_the_model_without_its_head(packed):
    model, directory = packed("mixtral")
    base = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected = model.model(**inputs(model)).last_hidden_state
        torch.testing.assert_close(base(**inputs(model)).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


def test_packed_bytes_count_in_the_memory_footprint(packed):
    loaded = moepack.load(packed("mixtral")[1])
    assert loaded.get_memory_footprint() > sum(module.nbytes for _, module in experts_modules(loaded)) > 0


def test_load_sets_threads(packed):
    before = torch.get_num_threads(), moepack._core.threads()
    try:
        moepack.load(packed("mixtral")[1], threads=1)
        assert (torch.get_num_threads(), moepack._core.threads()) == (1, 1)
        with pytest.raises(ValueError, match="at least 1"):
            moepack.load(packed("mixtral")[1], threads=0)
    finally:
        torch.set_num_threads(before[0])
        moepack._core.set_threads(before[1])


def test_automatic_device_maps_mean_the_cpu(packed):
    from moepack.integrations.transformers import MoepackConfig, MoepackQuantizer

    quantizer = MoepackQuantizer(MoepackConfig(version=1, packed={}))
    assert quantizer.update_device_map("auto") == {"": torch.device("cpu")}
    assert quantizer.update_device_map(None) is None
    quantizer.validate_environment(device_map={"": "cpu"})
    for device in ("cuda:0", 0, "disk"):
        with pytest.raises(LoadError, match=r"run (only )?on the CPU"):
            quantizer.validate_environment(device_map={"model.layers.0": device})


def test_registering_again_changes_nothing(packed):
    register()
    register()
    assert moepack.load(packed("mixtral")[1]) is not None


def test_a_hub_snapshot_gets_its_manifest(mixtral_copy, monkeypatch, tmp_path):
    """Transformers downloads config and weights of a repository, but no unknown files."""
    from moepack.integrations.transformers import _open_directory

    manifest = tmp_path / "moepack.json"
    shutil.move(mixtral_copy / "moepack.json", manifest)
    model = SimpleNamespace(config=SimpleNamespace(name_or_path="someone/model", _commit_hash="c0ffee"))

    def fail(*args, **kwargs):
        raise OSError("offline")

    monkeypatch.setattr("transformers.utils.cached_file", fail)
    with pytest.raises(LoadError, match=r"moepack\.json.*offline"):
        _open_directory(mixtral_copy, model)

    def fetch(repository, file, **kwargs):
        assert (repository, kwargs["revision"]) == ("someone/model", "c0ffee")
        shutil.copy(manifest, mixtral_copy / file)

    monkeypatch.setattr("transformers.utils.cached_file", fetch)
    assert _open_directory(mixtral_copy, model).manifest.packed()


def test_a_plain_checkpoint_is_not_quantized_on_the_fly(packed):
    _, directory = packed("mixtral")
    settings = json.loads((directory / "config.json").read_text())["quantization_config"]
    from moepack.integrations.transformers import MoepackConfig

    source = source_of(directory)
    with pytest.raises(ValueError, match="pre-quantized"):
        transformers.AutoModelForCausalLM.from_pretrained(source, quantization_config=MoepackConfig(**settings))


def test_plain_checkpoints_are_not_for_load(packed):
    _, directory = packed("mixtral")
    with pytest.raises(LoadError, match="not a packed directory"):
        moepack.load(source_of(directory))


def test_no_directory(tmp_path):
    with pytest.raises(LoadError, match=r"config\.json"):
        moepack.load(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "{", "[1]", '"moepack"'])
def test_a_damaged_config(mixtral_copy, text):
    (mixtral_copy / "config.json").write_text(text)
    with pytest.raises(LoadError, match=r"config\.json"):
        moepack.load(mixtral_copy)


def test_a_configuration_that_makes_no_sense(mixtral_copy):
    edit_config(mixtral_copy, lambda config: config.update(hidden_size="wide"))
    with pytest.raises(LoadError, match="hidden_size"):
        moepack.load(mixtral_copy)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"weight_map": {"a": "b"}}'])
def test_a_damaged_index(mixtral_copy, text):
    (mixtral_copy / "model.safetensors.index.json").write_text(text)
    with pytest.raises((LoadError, CorruptionError), match=str(mixtral_copy)) as caught:
        moepack.load(mixtral_copy)
    assert "\n" not in str(caught.value)


def test_a_newer_directory_asks_for_an_upgrade(mixtral_copy):
    edit_config(mixtral_copy, lambda config: config["quantization_config"].update(version=2))
    for load in (moepack.load, transformers.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(LoadError, match=r"version 2.*reads up to 1.*upgrade"):
            load(mixtral_copy)


@pytest.mark.parametrize("version", [0, -1, None, "1", True, 1.0])
def test_versions_that_mean_nothing(version):
    from moepack.integrations.transformers import MoepackConfig

    with pytest.raises(CorruptionError, match="version"):
        MoepackConfig(version=version, packed={})


@pytest.mark.parametrize(
    "shapes", [None, [], {"m": None}, {"m": {"wi": [1, 2]}}, {"m": {"wi": [1, 2, -3]}}, {"m": {"wi": [1, 2, "3"]}}]
)
def test_packed_entries_that_mean_nothing(shapes):
    from moepack.integrations.transformers import MoepackConfig

    with pytest.raises(CorruptionError, match=r"config\.json"):
        MoepackConfig(version=1, packed=shapes)


def test_truncated_and_missing_shards_are_named(mixtral_copy):
    shard = sorted(mixtral_copy.glob("*.safetensors"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:-64])
    for load in (moepack.load, transformers.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CorruptionError, match=shard.name):
            load(mixtral_copy)
    shard.unlink()
    with pytest.raises(CorruptionError, match=shard.name):
        moepack.load(mixtral_copy)


def test_a_damaged_blob_is_named_with_file_and_tensor(mixtral_copy):
    directory = PackedDirectory.open(mixtral_copy)
    name, record = next(iter(directory.manifest.packed().items()))
    shard = mixtral_copy / record.file
    content = bytearray(shard.read_bytes())
    start = content.index(directory.tensors()[name].tobytes())
    content[start : start + 64] = b"MOEPTERN" + b"\xff" * 56
    shard.write_bytes(content)
    with pytest.raises(CorruptionError) as caught:
        moepack.load(mixtral_copy)
    assert (caught.value.file, caught.value.tensor) == (str(shard), name)


def test_shapes_that_are_not_the_models(packed, tmp_path):
    _, directory = packed("mixtral")
    copy = shutil.copytree(directory, tmp_path / "copy")
    edit_config(copy, lambda config: config.update(num_local_experts=7))
    with pytest.raises(LoadError, match="but the model's configuration has"):
        moepack.load(copy)


def test_modules_that_the_model_does_not_have(mixtral_copy):
    edit_config(mixtral_copy, lambda config: config.update(num_hidden_layers=1))
    with pytest.raises(LoadError, match=r"no module 'model\.layers\.1\.mlp\.experts'"):
        moepack.load(mixtral_copy)


def test_modules_that_compute_something_else(mixtral_copy):
    def change(config):
        config["quantization_config"]["packed"] = {"model.layers.0.self_attn": {"gate_proj": [1, 1, 1]}}

    edit_config(mixtral_copy, change)
    with pytest.raises(UnsupportedModelError, match="no packed form"):
        moepack.load(mixtral_copy)


def test_transformers_without_moepack_fails_loudly(packed):
    code = """
        import os, sys
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # moepack, where it is installed, is a plugin of torch
        import transformers
        for directory, name in zip(sys.argv[1::2], sys.argv[2::2]):
            try:
                getattr(transformers, name).from_pretrained(directory)
            except RuntimeError as error:
                assert "ignore_mismatched_sizes" in str(error), error
            else:
                sys.exit(f"{directory} loaded without moepack")
        assert "moepack" not in sys.modules
    """
    decoders = [(packed(name)[1], "AutoModelForCausalLM") for name in ARCHITECTURES if name != SWITCH]
    arguments = [*decoders, (packed(SWITCH)[1], "AutoModelForSeq2SeqLM")]
    result = python(code, *(part for pair in arguments for part in pair))
    assert result.returncode == 0, result.stderr
    assert "Unknown quantization type, got moepack" in result.stderr


def test_import_after_transformers_and_reload(packed, tmp_path):
    directory = write_packed(tiny_model("mixtral"), tmp_path / "ternary", Ternary())
    code = """
        import sys
        import transformers
        from transformers import AutoModelForCausalLM
        import transformers.quantizers.auto
        import moepack
        assert "torch" in sys.modules
        for name in [name for name in sys.modules if name.startswith("moepack.integ")]:
            del sys.modules[name]
        import moepack.integrations
        moepack.integrations.register()
        AutoModelForCausalLM.from_pretrained(sys.argv[1])
    """
    result = python(code, directory)
    assert result.returncode == 0, result.stderr


def test_importing_moepack_alone_is_light():
    code = """
        import sys
        import moepack
        assert "transformers" not in sys.modules and "torch" not in sys.modules
    """
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_loading_adds_almost_no_anonymous_memory(tmp_path):
    """Private memory added by loading and running a packed model of 250 MB."""
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=512, intermediate_size=1792, num_hidden_layers=3, num_local_experts=8,
        num_attention_heads=8, num_key_value_heads=2, num_experts_per_tok=2, dtype="bfloat16", pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    directory = write_packed(model, tmp_path / "packed")
    del model
    size = sum(len(tensor) for tensor in PackedDirectory.open(directory).tensors().values())
    assert size > 250e6
    code = """
        import sys
        sys.path.insert(0, sys.argv[2])
        import torch
        import moepack, runtime_support
        from moepack.memory import anonymous_bytes
        small = runtime_support.tiny_model("mixtral")
        runtime_support.logits(small)
        before = anonymous_bytes()
        model = moepack.load(sys.argv[1])
        loaded = anonymous_bytes()
        with torch.inference_mode():
            model(input_ids=torch.ones(1, 4, dtype=torch.long))
        print(loaded - before, anonymous_bytes() - before)
    """
    result = python(code, directory, runtime_tests())
    assert result.returncode == 0, result.stderr
    loading, running = map(int, result.stdout.split())
    assert loading < 0.1 * size, (loading, size)
    assert running < 0.1 * size, (running, size)


def runtime_tests():
    import runtime_support

    return runtime_support.__file__.rpartition("/")[0]

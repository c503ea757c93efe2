"""Placement of packed models: device maps, memory, and errors. Needs no GPU."""

import copy

import pytest
import torch
from accelerate import infer_auto_device_map
from accelerate.utils import compute_module_sizes

import moepack
import runtime_support
from moepack.backends.gpu import compiler, device
from moepack.errors import DeviceError, DeviceMemoryError, LoadError
from moepack.format.weights import weight_files
from moepack.integrations import loading, placement
from moepack.integrations.placement import Placement
from moepack.stores.module import PackedModule
from runtime_support import inputs, logits

GPU = torch.device("cuda", 0)


@pytest.fixture
def directory(tmp_path):
    return runtime_support.write_packed(runtime_support.tiny_model("mixtral"), tmp_path / "packed")


@pytest.fixture
def gpus(monkeypatch):
    """Simulate usable GPUs with 1 GB of memory each."""
    monkeypatch.setattr(placement, "require", lambda device: torch.device("cuda", device.index or 0))
    monkeypatch.setattr(placement, "free_bytes", lambda device: 10**9)


@pytest.fixture
def skeleton(directory, gpus):
    """A model without memory, as in transformers' placement of layers."""
    return prepared(directory, "auto")


def prepared(directory, device_map):
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    quantizer = transformers.quantizers.auto.AutoHfQuantizer.from_config(config.quantization_config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    quantizer.preprocess_model(
        model, device_map=device_map, checkpoint_files=[str(directory / name) for name in weight_files(directory)]
    )
    return model, quantizer


def packed(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}


def test_accelerate_sees_the_size_of_packed_bytes(skeleton, directory):
    model, _ = skeleton
    sizes = compute_module_sizes(model)
    for name, module in packed(moepack.load(directory)).items():
        assert sizes[name] == module.nbytes > 0
    layer = sizes["model.layers.0"]
    room = {0: sizes["model.embed_tokens"] + int(1.2 * layer), "cpu": 10**9}
    found = infer_auto_device_map(model, room, no_split_module_classes=model._no_split_modules)
    places = Placement(found)
    assert places.device_of("model.embed_tokens").type == "cuda"
    assert places.device_of("model.layers.1.mlp.experts").type == "cpu"


def test_layers_on_the_cpu_beside_others_keep_their_bytes_there(skeleton):
    model, quantizer = skeleton
    quantizer.validate_environment(device_map={"": 0, "model.layers.1": "cpu"})
    first, second = packed(model).values()
    assert first.home is None and len(list(first.buffers())) == 3
    assert second.home == torch.device("cpu") and not list(second.buffers())


def test_too_little_memory_says_how_much_is_missing(skeleton, monkeypatch):
    _, quantizer = skeleton
    monkeypatch.setattr(placement, "free_bytes", lambda device: 10_000)
    with pytest.raises(DeviceMemoryError, match=r"the model takes .* are free on 'cuda:0': .* are missing; device_map"):
        quantizer.validate_environment(device_map={"": "cuda:0"})
    with pytest.raises(DeviceMemoryError, match="its part of the model"):
        quantizer.validate_environment(device_map={"": "cpu", "model.layers.0": "cuda:0"})


def test_a_device_map_over_the_cpu_alone_loads_normally(directory):
    expected = logits(moepack.load(directory))
    for device_map in ({"": "cpu"}, "cpu"):
        model = moepack.load(directory, device_map=device_map)
        assert torch.equal(logits(model), expected)
        assert all(module.home is None for module in packed(model).values())


def test_activations_travel_to_bytes_that_stay(directory):
    """A module on the CPU, called with activations of another device: here, the CPU itself."""
    model = moepack.load(directory)
    expected = logits(model)
    for module in packed(model).values():
        module.home = torch.device("cpu")
    assert torch.equal(logits(model), expected)
    with torch.inference_mode():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(**inputs(model)).logits, expected)


@pytest.mark.parametrize("path", ["", "model", "model.layers.1", "model.layers.1.mlp"])
def test_the_longest_path_counts(gpus, path):
    places = Placement({"model.layers.1": 1, "model": "cuda:0", "": "cpu"})
    expected = {"": "cpu", "model": "cuda:0"}.get(path, "cuda:1")
    assert places.device_of(path) == torch.device(expected)
    assert places.device_of("model.layers.10") == GPU and places.is_mixed


def test_arguments_that_exclude_each_other(directory):
    with pytest.raises(ValueError, match="mutually exclusive"):
        moepack.load(directory, device="cuda", device_map="auto")
    with pytest.raises(ValueError, match="resident"):
        moepack.load(directory, device="cuda", resident=True)
    with pytest.raises(LoadError, match="'disk'"):
        moepack.load(directory, device_map={"": "disk"})


def test_accelerate_is_missing(directory, monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"pip install 'moepack\[gpu\]'"):
        moepack.load(directory, device_map="auto")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(directory):
    with pytest.raises(DeviceError, match="no GPU can be used here"):
        moepack.load(directory, device="cuda")
    assert logits(moepack.load(directory, device_map="auto")).device.type == "cpu"


def test_gpus_that_cannot_be_used(monkeypatch):
    def fail(message):
        def init():
            raise RuntimeError(message)

        return init

    monkeypatch.setattr(torch.cuda, "init", fail("The NVIDIA driver on your system is too old (found version 11040)."))
    with pytest.raises(DeviceError, match="too old"):
        device.require(GPU)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match=r"no 'cuda:3': this machine has 1 GPU$"):
        device.require(torch.device("cuda", 3))
    device._require_capability.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(DeviceError, match=r"compute capability 7\.5.*8\.0"):
        device.require(GPU)


def test_architectures():
    assert [compiler.architecture(pair) for pair in ((8, 0), (8, 9), (9, 0), (10, 0))] == [
        "sm_80", "sm_89", "sm_90a", "sm_100",
    ]  # fmt: skip


def test_copies_keep_nothing_of_where_they_came_from(directory):
    model = moepack.load(directory)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model))

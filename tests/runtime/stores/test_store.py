"""Other kinds of backends and stores work without changes to the modules above them."""

import copy

import pytest
import torch

import moepack
from moepack import backends
from moepack.arrays import as_bytes
from moepack.backends import Backend, backend_for
from moepack.methods.finequant import FineQuant
from moepack.registry import open_tensor
from moepack.stores.base import ExpertStore
from moepack.stores.mapped import MappedStore
from moepack.stores.module import PackedModule
from moepack.stores.resident import ResidentStore
from runtime_support import SWITCH, inputs, logits, tiny_model, write_packed


class Unpacked:
    """All values of a packed tensor."""

    format = "unpacked"

    def __init__(self, tensor):
        self.shape = tensor.shape
        self.values = torch.from_numpy(tensor.dequantize())


class TorchBackend(Backend):
    """Plain torch, one token and one expert at a time."""

    def __init__(self):
        self.calls = 0

    def supports(self, device):
        return device.type == "cpu"

    def open(self, data, *, file=None, tensor=None):
        return Unpacked(open_tensor(data.numpy(), file=file, tensor=tensor))

    def linear(self, matrix, x, mode):
        self.calls += 1
        return x.float() @ matrix.values[0].T

    def experts(self, matrices, x, index, weights, activation, mode):
        self.calls += 1
        *first, last = (matrix.values for matrix in matrices)
        output = torch.zeros(x.shape)
        for token, slot in (index < len(last)).nonzero().tolist():
            expert, row = index[token, slot], x[token].float()
            inner = activation(first[0][expert] @ row)
            for values in first[1:]:
                inner = inner * (values[expert] @ row)
            output[token] += weights[token, slot] * (last[expert] @ inner)
        return output


class FarStore(ExpertStore):
    """Bytes outside of modules, which each call supplies."""

    def __init__(self):
        self.far, self.fetched = {}, []

    def put(self, layer, projection, data, *, file=None, tensor=None):
        self.far[id(layer), projection] = as_bytes(data).clone()

    def fetch(self, layer, experts, device):
        self.fetched.append(None if experts is None else set(experts.flatten().tolist()))
        return tuple(backend_for(device).open(self.far[id(layer), name]) for name in layer.shapes)

    def prefetch(self, layer, experts, device):
        pass


@pytest.fixture
def torch_backend():
    backend = TorchBackend()
    backends.register(backend)
    yield backend
    backends._backends.remove(backend)


@pytest.fixture(scope="module", params=["qwen2_moe", SWITCH])
def directory(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "model"
    return write_packed(tiny_model(request.param), path, FineQuant(bits=8, dense_bits=8))


def packed_modules(model):
    return [module for module in model.modules() if isinstance(module, PackedModule)]


def test_another_backend_needs_nothing_above_it(directory, torch_backend):
    model = moepack.load(directory, dtype="float32", mode="exact")
    found = logits(model)
    assert torch_backend.calls == len(packed_modules(model))
    backends._backends.remove(torch_backend)
    expected = logits(moepack.load(directory, dtype="float32", mode="exact"))
    backends.register(torch_backend)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_another_store_needs_nothing_above_it(directory):
    model, store = moepack.load(directory, dtype="float32"), FarStore()
    expected = logits(model)
    for module in packed_modules(model):
        module.store = store
        for name in module.projections:
            module.attach(name, module._buffers.pop(name))
        module.readers.clear()
    assert torch.equal(logits(model), expected)
    assert not any(module.nbytes for module in packed_modules(model))
    assert None in store.fetched and any(store.fetched)
    if not model.config.is_encoder_decoder:
        with torch.inference_mode():
            state = model(inputs(model, batch=1)["input_ids"], use_cache=True)
            model(torch.tensor([[5]]), past_key_values=state.past_key_values, use_cache=True)
        assert model.model.forward.steps == 0  # the core's decoder keeps its matrices, so the bytes must stay


def test_no_backend_has_a_device_and_no_bytes_are_there():
    with pytest.raises(moepack.LoadError, match=r"run on the CPU.*'meta'"):
        backend_for(torch.device("meta"))


def test_mapped_bytes_are_not_used_on_another_device(directory):
    module = packed_modules(moepack.load(directory))[0]
    with pytest.raises(moepack.LoadError, match="on 'cpu' cannot be used on 'cuda'"):
        module.store.fetch(module, None, torch.device("cuda"))


def test_bytes_given_to_a_resident_model_become_resident_and_copies_are_independent(directory):
    model = moepack.load(directory, dtype="float32", resident=True)
    module = packed_modules(model)[0]
    name = module.projections[0]
    assert type(module.store) is ResidentStore
    given = module.get_buffer(name).clone()
    state = {**model.state_dict(keep_vars=True)}
    path = next(path for path, found in model.named_modules() if found is module)
    expected = logits(model)
    model.load_state_dict({**state, f"{path}.{name}": given})
    assert module.get_buffer(name).data_ptr() != given.data_ptr()
    assert torch.equal(logits(model), expected)
    twin = copy.deepcopy(model)
    assert {type(found.store) for found in packed_modules(twin)} == {MappedStore}
    del model, module
    assert torch.equal(logits(twin), expected)

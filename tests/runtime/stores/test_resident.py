"""Weights moved from mapped files to private memory."""

from pathlib import Path

import pytest
import torch

import moepack
from moepack import memory
from moepack.integrations.loading import open_model
from moepack.stores import resident
from moepack.stores.module import PackedModule
from moepack.stores.resident import ResidentStore
from moepack.system.memory import group_limits

TOKENS = torch.arange(12).view(1, -1)


def packed_bytes(model):
    return {name: buffer for name, buffer in model.named_buffers() if buffer.dtype == torch.uint8}


def file_of(tensor):
    """The file that a tensor's first byte is mapped from, or None for memory without a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *name = line.split()
        low, high = (int(address, 16) for address in span.split("-"))
        if low <= tensor.data_ptr() < high:
            return name[0] if inode != "0" else None
    raise AssertionError("not in the address space")


def test_resident_weights_are_the_same_and_lie_in_no_file(packed):
    mapped, own = moepack.load(packed), moepack.load(packed, resident=True)
    assert torch.equal(own(TOKENS).logits, mapped(TOKENS).logits)
    before, after = packed_bytes(mapped), packed_bytes(own)
    assert before
    assert before.keys() == after.keys()
    for name, buffer in before.items():
        assert Path(file_of(buffer)).parent == packed
        assert file_of(after[name]) is None
        assert after[name].data_ptr() % 64 == 0
        assert torch.equal(after[name], buffer)
    for (name, old), new in zip(mapped.named_parameters(), own.parameters(), strict=True):
        assert file_of(new) is None, name
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        assert torch.equal(new, old)


def test_an_unpacked_model_can_be_resident(mixtral):
    model = open_model(mixtral, resident=True)
    assert torch.equal(model(TOKENS).logits, open_model(mixtral)(TOKENS).logits)
    assert {file_of(parameter) for parameter in model.parameters()} == {None}


def test_tied_parameters_stay_one(packed):
    model = moepack.load(packed)
    model.lm_head.weight = model.model.embed_tokens.weight
    ResidentStore().take(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert file_of(model.lm_head.weight) is None


def test_the_mode_survives(packed):
    model = moepack.load(packed, mode="int8", resident=True)
    assert {module.mode for module in model.modules() if isinstance(module, PackedModule)} == {"int8"}


def test_weights_larger_than_the_available_memory_are_refused_before_anything_is_copied(packed, monkeypatch):
    model = moepack.load(packed)
    addresses = [tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]]
    monkeypatch.setattr(resident, "available_bytes", lambda: 1000)
    with pytest.raises(moepack.LoadError, match=r"the weights take .* GB, but only 0\.00 GB .* without `resident`"):
        ResidentStore().take(model)
    assert [tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]] == addresses
    with pytest.raises(moepack.LoadError):
        moepack.load(packed, resident=True)


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", []), ("1000", [1000 - 900 + 50 + 30]), ("10", [0]), ("damaged", [])]
)
def test_the_free_memory_of_a_control_group_includes_its_page_cache(limit, expected, tmp_path):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 800\nactive_file 50\ninactive_file 30\n")
    assert list(group_limits(tmp_path)) == expected


def test_available_memory_is_less_than_all_of_it():
    total = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    assert 0 < memory.available_bytes() < total

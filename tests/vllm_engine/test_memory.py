"""What a packed model takes in vLLM: its packed bytes, in mapped files, and little else."""

from pathlib import Path

import pytest
import torch

import moepack
from moepack.methods.finequant import FineQuant
from moepack.methods.rate import Rate
from packed_support import manifest_of
from vllm_support import engine

METHODS = {"everything": lambda: Rate(bits_per_weight=4), "all but embeddings": lambda: FineQuant(dense_bits=8)}


def sizes(model: torch.nn.Module) -> tuple[int, list[int]]:
    """The bytes of all weights, and the addresses of packed ones."""
    weights = [*model.parameters()]
    addresses = []
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if hasattr(method, "packed"):
            buffers = [module.get_buffer(projection) for module, projection, _ in method.packed(layer)]
            weights += buffers
            addresses += [buffer.data_ptr() for buffer in buffers]
    storages = {tensor.data_ptr(): tensor.nbytes for tensor in weights}
    return sum(storages.values()), addresses


def mapped(addresses: list[int], directory: Path) -> bool:
    """Whether all addresses lie in maps of a directory's files."""
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [tuple(int(end, 16) for end in parts[0].split("-")) for parts in maps if str(directory) in parts[-1]]
    return all(any(start <= address < end for start, end in spans) for address in addresses)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_weights_take_their_packed_bytes(
    method: str, family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Mixtral's embedding is a layer to which vLLM gives no quantization."""
    moepack.compress(request.getfixturevalue(family), tmp_path / "packed", method=METHODS[method]())
    with engine(tmp_path / "packed", load_format="moepack", dtype="bfloat16") as running:
        [(total, addresses)] = running.apply_model(sizes)
        assert addresses and mapped(addresses, tmp_path)
    expected = sum(record.nbytes for record in manifest_of(tmp_path / "packed").tensors.values())
    assert total <= 1.05 * expected

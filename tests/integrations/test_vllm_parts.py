"""The parts of a linear layer that ranks of vLLM hold add up to the layer, in every format, also in compiled code."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import moepack
from moepack.export.directory import dense_entries
from moepack.format.directory import PackedDirectory
from moepack.methods.codequant import CodeQuant
from moepack.methods.finequant import FineQuant
from moepack.methods.rate import Rate
from moepack.vllm.parts import Part, Slab, Source

METHODS = {
    "groupwise": lambda: FineQuant(bits=4, group_size=32, dense_bits=8),
    "coded": lambda: Rate(bits_per_weight=4),
    "codebook": CodeQuant,
}
NAME = "model.layers.0.self_attn.o_proj.weight"


@pytest.fixture(scope="module", params=METHODS)
def source(request: pytest.FixtureRequest, mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Source:
    out = tmp_path_factory.mktemp("parts") / "packed"
    moepack.compress(mixtral, out, method=METHODS[request.param]())
    directory = PackedDirectory.open(out)
    entries = {entry.name: entry for shard in dense_entries(directory) for entry in shard}
    return Source(directory, torch.device("cpu"), entries)


def slab(source: Source, rows: range | None = None, columns: range | None = None) -> Slab:
    """A loaded part of a projection, by default the whole."""
    record = source.directory.manifest.tensors[NAME]
    height, width = record.shape
    part = Part({"weight": NAME}, {"weight": (1, height, width)}, record.packed)
    made = Slab(part, range(height) if rows is None else rows, range(width) if columns is None else columns)
    made.load(source, torch.float32)
    return made


def test_rows_of_ranks_are_the_rows_of_the_layer(source: Source) -> None:
    whole = slab(source)
    x = torch.randn(3, len(whole.columns))
    bounds = [0, 7, len(whole.rows) // 2, len(whole.rows)]  # 7 is where no packed format can be cut
    parts = [slab(source, range(*pair)) for pair in pairwise(bounds)]
    torch.testing.assert_close(torch.cat([part(x) for part in parts], -1), whole(x), rtol=0, atol=1e-5)


def test_columns_of_ranks_add_up_to_the_layer(source: Source) -> None:
    whole = slab(source)
    middle = len(whole.columns) // 2
    x = torch.randn(3, len(whole.columns))
    parts = [slab(source, columns=span) for span in (range(middle), range(middle, len(whole.columns)))]
    found = sum(part(x[:, part.columns.start : part.columns.stop]) for part in parts)
    torch.testing.assert_close(found, whole(x), rtol=0, atol=0.05 * float(whole(x).abs().max()))


def test_a_part_is_compiled_in_one_graph(source: Source) -> None:
    part = slab(source, range(7, 20), range(0, 16))
    x = torch.randn(5, 16)
    compiled = torch.compile(part, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(x), part(x))


def test_a_tensor_that_is_held_whole_is_reported(source: Source) -> None:
    source.whole.clear()
    record = source.directory.manifest.tensors[NAME]
    held = slab(source, columns=range(0, 16)).held_columns
    assert source.whole == ({NAME} if record.packed and held == range(record.shape[1]) else set())
    assert record.kind != "coded" or source.whole == {NAME}

"""`benches/quality/rivals.py`: printed sizes, and the exchange with llama.cpp's quantizer."""

import pytest
import torch

from benches.quality import rivals
from benches.tools import ggml_quantizer, quantizers, real


def test_sizes_count_metadata_and_unquantized_weights() -> None:
    weight = torch.zeros(64, 128)
    bits = quantizers.grouped_bits(weight.shape, 3, 64, 16, 3)
    assert bits == 64 * 128 * (3 + 19 / 64)
    found = rivals.sizes_of({"layers.0.q_proj.weight": (bits, weight.numel())}, 2 * weight.numel())
    assert found == {"layer_bits": round(3 + 19 / 64, 3), "bits": round((3 + 19 / 64 + 16) / 2, 3)}


def test_a_group_that_is_not_full_has_a_scale_of_its_own() -> None:
    assert quantizers.grouped_bits(torch.Size((2, 130)), 4, 64, 16, 0) == 2 * (130 * 4 + 3 * 16)


def test_an_embedding_counts_among_everything_and_not_among_layers() -> None:
    found = rivals.sizes_of({"model.embed_tokens.weight": (600.0, 100), "layers.0.up_proj.weight": (300.0, 100)}, 200)
    assert found == {"layer_bits": 3.0, "bits": 4.5}


@pytest.mark.parametrize(("name", "heads"), [("q_proj", 4), ("k_proj", 2)])
def test_rows_of_heads_come_back_in_the_order_that_they_had(name: str, heads: int) -> None:
    turned = ggml_quantizer.Turned({"num_attention_heads": 4, "num_key_value_heads": 2})
    place, weight = f"model.layers.0.self_attn.{name}.weight", torch.randn(heads * 8, 24)
    written = turned.to_gguf(place, weight)
    assert not torch.equal(written, weight)
    assert torch.equal(real._unpermuted(written, heads), weight)
    assert torch.equal(turned.from_gguf(place, written), weight)


@pytest.mark.parametrize(("columns", "rows"), [(576, 4), (1536, 1), (64, 4), (192, 4), (2048, 1)])
def test_folded_rows_fill_whole_blocks(columns: int, rows: int) -> None:
    assert ggml_quantizer.fold(columns) == rows
    assert rows * columns % ggml_quantizer.BLOCK == 0

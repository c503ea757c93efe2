"""Packed embeddings and heads: row look-ups in coded bytes, ties, and the whole path from compress to generate."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import moepack
import packed_support as support
from moepack.checkpoint import Checkpoint
from moepack.cli.inspect import print_directory
from moepack.decoding.decoder import set_decoding
from moepack.errors import LoadError
from moepack.export import export
from moepack.format import PackedDirectory
from moepack.methods.rate import Rate
from moepack.modules.embedding import PackedEmbedding
from moepack.modules.linear import PackedLinear

NAME = "model.embed_tokens.weight"
IDS = torch.tensor([[3, 200, 3, 0, 57, 270, 64, 63, 128]])
"""Rows of all streams, some twice."""

Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def directory(tiny_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A function from an architecture to a completely packed directory; mixtral is tied, qwen3_moe is not."""

    def make(architecture: str) -> Path:
        path: Path = tmp_path_factory.getbasetemp() / f"embedding-{architecture}"
        if not path.exists():
            moepack.compress(tiny_checkpoint(architecture), path, method=Rate(5.0))
        return path

    return make


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize("options", [{}, {"resident": True}, {"host_memory": "1GB"}], ids=str)
def test_the_model_computes_the_same_as_its_export(
    architecture: str, options: Any, directory: Make, tmp_path: Path
) -> None:
    packed = moepack.load(directory(architecture), dtype="float32", mode="exact", **options)
    assert isinstance(packed.model.embed_tokens, PackedEmbedding) and isinstance(packed.lm_head, PackedLinear)
    export(directory(architecture), tmp_path / "bf16", to="bf16")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32)
    torch.testing.assert_close(packed.model.embed_tokens(IDS), plain.model.embed_tokens(IDS), rtol=2**-8, atol=0)
    torch.testing.assert_close(packed(IDS).logits, plain(IDS).logits, rtol=0.02, atol=0.02)
    tied = bool(plain.config.tie_word_embeddings)
    assert ("lm_head.weight" in Checkpoint.open(tmp_path / "bf16").names()) is not tied
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) is tied


def test_a_tie_is_kept(directory: Make, mixtral: Path) -> None:
    """One tensor serves both, in the file and in memory."""
    records = PackedDirectory.open(directory("mixtral")).manifest.tensors
    assert records[NAME].kind == "coded" and records[NAME].details["role"] == "embedding"
    assert "lm_head.weight" not in records
    model = moepack.load(directory("mixtral"))
    assert model.lm_head.packed.data_ptr() == model.model.embed_tokens.packed.data_ptr()
    settings = model.config.quantization_config.packed
    assert settings["model.embed_tokens"] == {"weight": [285, 64]} and "lm_head" not in settings


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_the_core_decodes_and_generates_the_same(architecture: str, directory: Make) -> None:
    model, found = moepack.load(directory(architecture), dtype="float32"), []
    try:
        for mode in ("native", "transformers"):
            set_decoding(mode)
            found.append(model.generate(IDS[:, 4:], max_new_tokens=6, min_new_tokens=6, do_sample=False))
        assert model.model.forward.steps == 5
    finally:
        set_decoding(None)
    assert torch.equal(*found)


def test_the_model_without_its_head(directory: Make) -> None:
    body = transformers.AutoModel.from_pretrained(directory("mixtral"))
    assert torch.isfinite(body(IDS).last_hidden_state).all()


def test_a_failed_move_leaves_the_module_as_it_was(directory: Make) -> None:
    embedding = moepack.load(directory("mixtral")).model.embed_tokens
    rows = embedding(IDS)

    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no driver")

    with pytest.raises(RuntimeError, match="no driver"):
        embedding._apply(fail)
    assert torch.equal(embedding(IDS), rows)


def test_casts_and_copies(directory: Make) -> None:
    embedding = moepack.load(directory("mixtral")).model.embed_tokens
    rows = embedding(IDS)
    assert rows.dtype == torch.bfloat16 and rows.shape == (1, 9, 64)
    for dtype in (torch.float32, torch.float16):
        embedding.to(dtype)
        assert embedding(IDS).dtype == dtype
        # Rounding twice may give the next bfloat16, at most 2^-7 away.
        torch.testing.assert_close(embedding(IDS).bfloat16(), rows, rtol=2**-7, atol=0)
    copy = PackedEmbedding(285, 64, torch.bfloat16)
    copy.load_state_dict(embedding.state_dict())
    assert torch.equal(copy(IDS), rows)
    decoded = PackedEmbedding(285, 64, torch.bfloat16)  # as on a GPU
    decoded.decode(embedding.packed, torch.device("cpu"))
    assert torch.equal(decoded(IDS), rows) and decoded.packed_bytes() is None


def test_bytes_stay_on_the_cpu_where_a_model_is_moved(directory: Make) -> None:
    """A device that keeps nothing simulates a GPU, where the module has a table."""
    embedding = moepack.load(directory("mixtral")).model.embed_tokens
    rows = embedding(IDS)
    embedding.to("meta")
    assert embedding.packed.device.type == "cpu" and embedding.table.device.type == "meta"
    assert embedding.table.shape == (285, 64) and embedding.table.dtype == torch.bfloat16
    embedding.to_empty(device="cpu")
    assert embedding.table is None and torch.equal(embedding(IDS), rows)


def test_compiled_code_looks_up_the_same(directory: Make) -> None:
    embedding = moepack.load(directory("mixtral")).model.embed_tokens
    assert torch.equal(torch.compile(embedding, backend="eager", fullgraph=True)(IDS), embedding(IDS))


@pytest.mark.parametrize("row", [-1, 285, 2**40])
def test_invalid_tokens_are_rejected(row: int, directory: Make) -> None:
    embedding = moepack.load(directory("mixtral")).model.embed_tokens
    with pytest.raises(ValueError, match="row"):
        embedding(torch.tensor([3, row]))


def test_verify_and_inspect(directory: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = shutil.copytree(directory("mixtral"), tmp_path / "copied")
    print_directory(copied, as_json=True)
    rows = json.loads(capsys.readouterr().out)["tensors"]
    (row,) = (row for row in rows if row["role"] == "embedding")
    assert (row["layer"], row["projection"], row["shape"]) == ("model", "embed_tokens", [285, 64])
    assert moepack.verify(copied).ok
    record = PackedDirectory.open(copied).manifest.tensors[NAME]
    data = (copied / record.file).read_bytes()
    support.flip(copied / record.file, 8 * (len(data) - 200))
    (fault, *_) = moepack.verify(copied).faults
    assert fault.tensor == NAME


@pytest.mark.parametrize("roles", ["embedding", "attention"])
def test_roles_decide_whether_it_is_packed(roles: str, mixtral: Path, tmp_path: Path) -> None:
    moepack.compress(mixtral, tmp_path / "packed", method=Rate(4.0, roles=roles))
    model = moepack.load(tmp_path / "packed")
    assert type(model.model.embed_tokens) is (PackedEmbedding if roles == "embedding" else nn.Embedding)
    assert type(model.lm_head) is (PackedLinear if roles == "embedding" else nn.Linear)
    assert torch.isfinite(model(IDS).logits).all()


def test_another_vocabulary_is_refused(directory: Make, tmp_path: Path) -> None:
    copied = shutil.copytree(directory("mixtral"), tmp_path / "copied")
    config = (copied / "config.json").read_text()
    (copied / "config.json").write_text(config.replace('"vocab_size": 285', '"vocab_size": 286'))
    with pytest.raises(LoadError, match="embed_tokens"):
        moepack.load(copied)

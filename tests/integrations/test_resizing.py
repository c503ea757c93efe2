"""`resize_token_embeddings` of packed models: the size that they have, or an error that says what to do."""

import copy
import pickle
from pathlib import Path

import pytest

import moepack
from moepack import UnsupportedModelError


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, mixtral: Path) -> Path:
    directory = tmp_path_factory.mktemp("packed") / "packed"
    moepack.compress(mixtral, directory, method="rate", bits_per_weight=4.0, calibration="none")
    return directory


@pytest.mark.parametrize("through", [lambda model: model, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_packed_vocabulary_keeps_its_size(packed: Path, through: object) -> None:
    model = through(moepack.load(packed))  # type: ignore[operator]
    rows = model.config.vocab_size
    for arguments in ((), (rows,), (rows - 1, rows)):
        assert model.resize_token_embeddings(*arguments) is model.get_input_embeddings()
    with pytest.raises(UnsupportedModelError, match=f"packed embedding of {rows} tokens cannot have {rows + 3}"):
        model.resize_token_embeddings(rows + 3)
    with pytest.raises(UnsupportedModelError, match=r"unpacked with --bits 'embed_tokens=16"):
        model.resize_token_embeddings(pad_to_multiple_of=rows + 1)


def test_the_error_is_right(packed: Path, mixtral: Path, tmp_path: Path) -> None:
    loaded = moepack.load(packed)
    with pytest.raises(UnsupportedModelError) as caught:
        loaded.resize_token_embeddings(3)
    bits = str(caught.value).split("'")[-2]
    directory = tmp_path / "out"
    moepack.compress(mixtral, directory, method="rate", bits_per_weight=4.0, calibration="none", bits=bits)
    model = moepack.load(directory)
    rows = model.config.vocab_size
    assert model.resize_token_embeddings(rows + 3).num_embeddings == rows + 3

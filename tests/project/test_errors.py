"""The error types: hierarchy, messages, and pickling (worker processes send them back)."""

import pickle

import pytest

import moepack
from moepack import errors

CLASSES = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]


@pytest.mark.parametrize("kind", CLASSES)
def test_message_names_file_and_tensor(kind: type[errors.MoepackError]) -> None:
    error = kind("is damaged", file="a/b.safetensors", tensor="model.x")
    assert str(error) == "a/b.safetensors: tensor 'model.x': is damaged"
    assert (error.file, error.tensor) == ("a/b.safetensors", "model.x")
    assert str(kind("plain")) == "plain"


@pytest.mark.parametrize("kind", CLASSES)
def test_pickle_keeps_everything(kind: type[errors.MoepackError]) -> None:
    error = pickle.loads(pickle.dumps(kind("is damaged", file="f", tensor="t")))
    assert type(error) is kind
    assert (str(error), error.file, error.tensor) == ("f: tensor 't': is damaged", "f", "t")


def test_builtin_bases() -> None:
    assert all(issubclass(kind, errors.MoepackError) for kind in CLASSES)
    assert issubclass(errors.CorruptionError, ValueError)
    assert issubclass(errors.InvalidTensorError, ValueError)
    assert issubclass(errors.OutputExistsError, FileExistsError)
    assert issubclass(errors.DiskError, OSError)


def test_every_export_resolves() -> None:
    for name in moepack.__all__:
        assert getattr(moepack, name) is not None
    assert set(moepack.__all__) <= set(dir(moepack))
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = moepack.no_such_thing

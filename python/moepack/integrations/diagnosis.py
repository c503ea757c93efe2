"""Tells which code runs decoding steps of a model, packed or not."""

from os import PathLike

from moepack.checkpoint.classes import meta_model
from moepack.checkpoint.resolve import resolve_model
from moepack.decoding.families import decoder_of, family_of
from moepack.decoding.stepping import stepping, tried
from moepack.errors import LoadError
from moepack.format.regular import read_json
from moepack.integrations.loading import is_packed, load

__all__ = ["who_decodes"]


def who_decodes(directory: str | PathLike[str]) -> str:
    """Describe in one sentence what runs a decoding step on the CPU.

    Args:
        directory: a packed directory, which is loaded and run for a few steps; or a checkpoint, of which only
            config.json is read; or a Hub id of either.

    Raises:
        LoadError, CheckpointError, CorruptionError: the directory cannot be read.
        UnsupportedModelError: the installed transformers does not support the model.
    """
    path = resolve_model(directory)
    config = read_json(path / "config.json", LoadError)
    if is_packed(path):
        return str(tried(load(path)))
    model = meta_model(path, config)
    if family_of(decoder_of(model)) is None:
        return str(stepping(model))
    return "decoded by moepack's decoder once it is packed, if the decoder supports its settings"

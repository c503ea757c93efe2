"""Who takes a decoding step of a model: the core, or transformers with moepack's layer products, and why."""

from os import PathLike
from typing import Any

from moepack.checkpoint.classes import meta_model
from moepack.checkpoint.resolve import resolve_model
from moepack.errors import LoadError
from moepack.format.regular import read_json
from moepack.integrations.loading import is_packed, load
from moepack.runtime.families import FAMILIES, decoder_of
from moepack.runtime.plan import Plan, Unknown, is_known

__all__ = ["who_decodes"]

_OTHERWISE = "transformers, with the products of layers by moepack"


def who_decodes(directory: str | PathLike[str]) -> str:
    """Say in a sentence what takes a decoding step on the CPU.

    Args:
        directory: a packed directory, which is loaded, or a checkpoint, of which config.json is read; or an id of the
            hub.

    Raises:
        LoadError, CheckpointError, CorruptionError: it cannot be read.
        UnsupportedModelError: the installed transformers does not know the model.
    """
    path = resolve_model(directory)
    packed, config = is_packed(path), read_json(path / "config.json", LoadError)
    model: Any = load(path) if packed else meta_model(path, config)
    decoder = decoder_of(model)
    if not is_known(decoder):
        return f"{_OTHERWISE}: the core decodes {', '.join(FAMILIES)}, not {config['model_type']}"
    if not packed:
        return "the core, once it is packed, if its settings are among those that the core knows"
    try:
        Plan(decoder)
    except Unknown as reason:
        return f"{_OTHERWISE}: the core does not compute {reason}"
    return "the core, in one call a token"

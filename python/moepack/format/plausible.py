"""How large a model config.json may claim to be: no larger than its files can hold.

Numbers of layers and experts and widths decide how much is built and allocated before the first tensor is compared with
anything. A layer has a tensor at least, and an expert some bytes, so the files that are there bound them.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moepack.errors import MoepackError

__all__ = ["SMALL", "check_config"]

EXPERT_BYTES = 64
"""Bytes that an expert takes at least, however it is stored."""

SMALL = 1 << 20
"""Widths, and bytes of files, that are never too large or too small: a model of so few values costs next to nothing."""

_NO_SIZES = ("quantization_config", "rope_parameters", "rope_scaling")
"""Settings inside which nothing is a size."""

_KINDS = {
    "layers": re.compile(r"(?:n|num|encoder|decoder)(?:_\w+)?_layers"),
    "experts": re.compile(r"(?:\w+_)?(?:n|num)_(?:\w+_)?experts"),
    "width": re.compile(r"\w+_(?:size|dim|rank|heads|buckets)|d_(?:model|ff|kv)"),
}


def check_config(config: Mapping[str, Any], tensors: int, nbytes: int, file: Path, error: type[MoepackError]) -> None:
    """Hold a model's configuration against its files.

    Args:
        config: the content of config.json.
        tensors: how many tensors the files hold.
        nbytes: the size of the files in bytes.
        file: where the configuration is from, for the error.
        error: the class to raise.

    Raises:
        error: a number of layers or experts or a width is no whole number, negative, or more than the files can hold.
    """
    nbytes = max(nbytes, SMALL)
    most = {"layers": tensors, "experts": nbytes // EXPERT_BYTES, "width": nbytes}
    largest = dict.fromkeys(most, 0)
    for key, kind, value in _claims(config):
        if type(value) is not int or value < 0:
            raise error(f"{key} is {value!r}, not a number from 0 on", file=file)
        if value > most[kind]:
            raise error(f"{key} is {value}: too many for files of {tensors} tensors and {nbytes} bytes", file=file)
        largest[kind] = max(largest[kind], value)
    if largest["layers"] * largest["experts"] > most["experts"]:
        message = f"{largest['layers']} layers of {largest['experts']} experts do not fit into files of {nbytes} bytes"
        raise error(message, file=file)


def _claims(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Key, kind and value of every size in a configuration and the configurations inside it."""
    for key, value in config.items():
        if isinstance(value, dict) and key not in _NO_SIZES:
            yield from _claims(value)
        kind = next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(key)), None)
        if kind is not None and value is not None:
            yield from ((key, kind, each) for each in (value if isinstance(value, list) else [value]))

"""Checks that config.json describes a model no larger than its files can hold.

The numbers of layers and experts and the widths determine allocations before the first tensor is checked. A layer has
at least one tensor and an expert some bytes, so the existing files bound these numbers.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moepack.errors import MoepackError

__all__ = ["SMALL", "check_config"]

EXPERT_BYTES = 64
"""Minimum bytes of an expert in any format."""

SMALL = 1 << 20
"""Widths and file sizes up to this value are always accepted, because such a small model costs almost nothing."""

_NO_SIZES = ("quantization_config", "rope_parameters", "rope_scaling")
"""Settings that contain no sizes."""

_KINDS = {
    "layers": re.compile(r"(?:n|num|encoder|decoder)(?:_\w+)?_layers"),
    "experts": re.compile(r"(?:\w+_)?(?:n|num)_(?:\w+_)?experts"),
    "width": re.compile(r"\w+_(?:size|dim|rank|heads|buckets)|d_(?:model|ff|kv)"),
}


def check_config(config: Mapping[str, Any], tensors: int, nbytes: int, file: Path, error: type[MoepackError]) -> None:
    """Check a model's configuration against its files.

    Args:
        config: the content of config.json.
        tensors: number of tensors in the files.
        nbytes: size of the files in bytes.
        file: path of the configuration, for the error.
        error: the exception class to raise.

    Raises:
        error: a number of layers or experts or a width is not an integer, negative, or more than the files can hold.
    """
    nbytes = max(nbytes, SMALL)
    most = {"layers": tensors, "experts": nbytes // EXPERT_BYTES, "width": nbytes}
    largest = dict.fromkeys(most, 0)
    for key, kind, value in _claims(config):
        if type(value) is not int or value < 0:
            raise error(f"{key} is {value!r}, not a whole number of at least 0", file=file)
        if value > most[kind]:
            raise error(f"{key} is {value}: too many for files of {tensors} tensors and {nbytes} bytes", file=file)
        largest[kind] = max(largest[kind], value)
    if largest["layers"] * largest["experts"] > most["experts"]:
        message = f"{largest['layers']} layers of {largest['experts']} experts do not fit into files of {nbytes} bytes"
        raise error(message, file=file)


def _claims(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield key, kind and value of every size in a configuration and its nested configurations."""
    for key, value in config.items():
        if isinstance(value, dict) and key not in _NO_SIZES:
            yield from _claims(value)
        kind = next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(key)), None)
        if kind is not None and value is not None:
            yield from ((key, kind, each) for each in (value if isinstance(value, list) else [value]))

"""Cuts packed tensors of any format: checks a selection, and hands it to the cutter of the format."""

from collections.abc import Mapping

from moepack.errors import LoadError
from moepack.registry import MAGIC_BYTES, open_tensor
from moepack.slices.base import Bytes, Cutter, Grain, Selection
from moepack.slices.blocks import CODEBOOK, GROUPWISE
from moepack.slices.coded import CODED
from moepack.slices.compensated import COMPENSATED
from moepack.slices.ternary import TERNARY

__all__ = ["cut", "enclosing", "grain_of"]

_CUTTERS: Mapping[bytes, Cutter] = {
    b"MOEPGRPW": GROUPWISE,
    b"MOEPCODE": CODEBOOK,
    b"MOEPRANS": CODED,
    b"MOEPTERN": TERNARY,
    b"MOEPCOMP": COMPENSATED,
}

WHOLE = Grain(0, 0, experts=False)


def grain_of(data: Bytes) -> Grain:
    """Return where a packed tensor can be cut. Its metadata must be checked (`moepack.registry.open_tensor`)."""
    cutter = _CUTTERS.get(data[:MAGIC_BYTES].tobytes())
    return WHOLE if cutter is None else cutter.grain(data)


def enclosing(span: range, size: int, grain: int, least: int = 1) -> range:
    """Return the smallest range that contains `span` and begins and ends where a tensor can be cut.

    Args:
        span: rows or columns, with step 1.
        size: the tensor's rows or columns.
        grain: `Grain.rows` or `Grain.columns`.
        least: `Grain.least`.
    """
    if grain == 0:
        return range(size)
    found = range(span.start // grain * grain, min(-(-span.stop // grain) * grain, size))
    return range(size) if len(found) < min(least, size) else found


def cut(data: Bytes, selection: Selection, **place: str) -> Bytes:
    """Return a slice of a packed tensor, as a packed tensor.

    Args:
        data: the tensor's bytes, flat uint8.
        selection: experts, rows and columns.
        **place: `file` and `tensor`, for messages.

    Returns:
        `data` if the selection is the whole tensor, otherwise a copy of the selected bytes.

    Raises:
        CorruptionError: the bytes contradict their format.
        LoadError: the format cannot be cut there, or the tensor does not have the selected experts, rows or columns.
    """
    experts, rows, columns = open_tensor(data, **place).shape
    if (
        [*selection.experts] == [*range(experts)]
        and selection.rows == range(rows)
        and selection.columns == range(columns)
    ):
        return data
    if not all(0 <= expert < experts for expert in selection.experts):
        raise LoadError(f"has experts 0 to {experts - 1}, but {[*selection.experts]} were requested", **place)
    grain = grain_of(data)
    if not grain.experts:
        raise LoadError("has a format that cannot be cut", **place)
    for axis, span, size, unit in (
        ("rows", selection.rows, rows, grain.rows),
        ("columns", selection.columns, columns, grain.columns),
    ):
        if not 0 <= span.start < span.stop <= size or span != enclosing(span, size, unit, grain.least):
            limit = f"at multiples of {unit}" if unit else "nowhere"
            raise LoadError(f"has {size} {axis}, cut {limit}; {span.start} to {span.stop} were requested", **place)
    return _CUTTERS[data[:MAGIC_BYTES].tobytes()].cut(data, selection)

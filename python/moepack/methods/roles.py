"""The setting `dense_bits`: bits per role of the linear layers outside the experts to pack."""

from collections.abc import Mapping

from moepack.checkpoint.dense import ROLES
from moepack.solvers.widths import BITS

__all__ = ["as_number", "dense_text", "parse_dense_bits"]


def parse_dense_bits(given: str | int | None) -> dict[str, int]:
    """Parse `dense_bits`: None, one number for all roles except the head, or comma-separated `role=bits` pairs.

    Raises:
        ValueError: a role or number of bits is unknown.
    """
    if given is None or given == "":
        return {}
    text = str(given)
    if "=" not in text:
        pairs = [(role, text) for role in ROLES if role != "head"]
    else:
        pairs = [tuple(part.split("=", 1)) for part in text.split(",") if "=" in part]  # type: ignore[misc]
        if len(pairs) != len(text.split(",")):
            raise ValueError(f"dense_bits must be a number or role=bits pairs, not '{text}'")
    found = {role.strip(): as_number(bits, "dense_bits") for role, bits in pairs}
    if len(found) < len(pairs):
        raise ValueError(f"dense_bits names a role twice: '{text}'")
    if not set(found) <= set(ROLES) or not set(found.values()) <= set(BITS):
        raise ValueError(f"dense_bits: roles are {', '.join(ROLES)} and bits 2, 3, 4 or 8, not '{text}'")
    return {role: found[role] for role in ROLES if role in found}


def dense_text(bits: Mapping[str, int]) -> str:
    """Return the canonical text form of the result of `parse_dense_bits`."""
    return ",".join(f"{role}={number}" for role, number in bits.items())


def as_number(value: int | str, what: str) -> int:
    """Convert a setting to an integer.

    Raises:
        ValueError: it is not an integer; names the setting.
    """
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{what} must be a number, not '{value}'") from None

"""Libraries of macOS (Mach-O) without traces of their build: the UUID becomes a hash of the rest.

Linkers derive the UUID from debug information that names folders, and which is stripped afterwards. Libraries for Arm
carry an ad-hoc signature, a list of the SHA-256 of their pages, which covers the UUID and is computed again.
"""

from __future__ import annotations

import hashlib
import struct

MAGIC = b"\xcf\xfa\xed\xfe"
"""The first bytes of a 64-bit little-endian file."""

UUID, CODE_SIGNATURE = 0x1B, 0x1D
"""Load commands."""

DIRECTORY, SHA256 = 0xFADE0C02, 2
"""Magic of the list of page hashes in a signature, and the kind of hash that is supported."""


def identified(library: bytes) -> bytes:
    """Return a library whose UUID is a hash of its other bytes without the signature.

    Raises:
        ValueError: the library has no UUID, or a signature of another kind.
    """
    found, commands = bytearray(library), load_commands(library)
    if UUID not in commands:
        raise ValueError("the library has no UUID")
    place = slice(commands[UUID] + 8, commands[UUID] + 24)
    found[place] = bytes(16)
    signature = commands.get(CODE_SIGNATURE)
    end = len(found) if signature is None else struct.unpack_from("<I", found, signature + 8)[0]
    found[place] = hashlib.sha256(found[:end]).digest()[:16]
    if signature is not None:
        sign(found, end)
    return bytes(found)


def load_commands(library: bytes) -> dict[int, int]:
    """Return the offset of the last load command of each kind."""
    found, offset = {}, 32
    for _ in range(struct.unpack_from("<I", library, 16)[0]):
        kind, size = struct.unpack_from("<2I", library, offset)
        found[kind] = offset
        offset += size
    return found


def sign(library: bytearray, start: int) -> None:
    """Compute the page hashes of the signature at `start` again."""
    count = struct.unpack_from(">I", library, start + 8)[0]
    for number in range(count):
        blob = start + struct.unpack_from(">I", library, start + 16 + 8 * number)[0]
        if struct.unpack_from(">I", library, blob)[0] != DIRECTORY:
            continue
        hashes, _, _, pages, limit, size, kind, _, power = struct.unpack_from(">5I4B", library, blob + 16)
        if kind != SHA256:
            raise ValueError(f"the signature has hashes of kind {kind}")
        for page in range(pages):
            content = library[page << power : min((page + 1) << power, limit)]
            place = blob + hashes + size * page
            library[place : place + size] = hashlib.sha256(content).digest()[:size]

"""A reader of entropy-coded group-wise tensors written from docs/format.md, section 6.1, and from nothing else."""

import struct

from oracle.groupwise import record


def codewords(lengths: list[int]) -> dict[str, int]:
    """The symbols of a canonical code by their codewords, first bit first."""
    found, number, width = {}, 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        number <<= length - width
        width = length
        found[f"{number:0{length}b}"] = symbol
        number += 1
    assert number == 1 << width, "the code is not complete"
    return found


def decode(stream: bytes, codes: list[dict[str, int]], count: int) -> bytes:
    """`count` symbols of a stream, by the codes in turn."""
    bits = "".join(f"{byte:08b}"[::-1] for byte in stream)
    out, at = bytearray(), 0
    for i in range(count):
        length = next(n for n in range(1, 12) if bits[at : at + n] in codes[i % len(codes)])
        out.append(codes[i % len(codes)][bits[at : at + length]])
        at += length
    assert len(bits) - at < 8 and not int("0" + bits[at:], 2)
    return bytes(out)


def expand(data: bytes) -> bytes:
    """The group-wise tensor that a coded one stands for."""
    magic, version, payload = struct.unpack_from("<8sH6xQ", data)
    assert (magic, version) == (b"MOEPGRPC", 1)
    header = data[64:192]
    _, _, bits, _, _, symmetric = struct.unpack_from("<8sHBBBB", header)
    experts, rows, columns, group = struct.unpack_from("<4Q", header, 16)
    nibbles = [nibble for byte in data[192:576] for nibble in (byte & 15, byte >> 4)]
    low, high, third = (codewords(nibbles[i * 256 : (i + 1) * 256]) for i in range(3))
    groups, count, registers = record(group, bits, columns, 2 - symmetric)
    size = -(-groups * (2 - symmetric) * 32 // 64) * 64
    parameters, codes = count * size, -(-columns // 32) * bits * 64
    quarter = -(-codes // 4)
    sizes = [min(quarter, max(codes - i * quarter, 0)) for i in range(4)]
    blocks = experts * -(-rows // 16)
    index = struct.unpack_from(f"<{5 * blocks}H", data, 576)
    at = start = -(-(576 + 10 * blocks) // 64) * 64
    out = bytearray(header)
    for block in range(blocks):
        decoded = []
        for part, length in enumerate(index[5 * block : 5 * block + 5]):
            tables, symbols = ([low, high], parameters) if part == 0 else ([third], sizes[part - 1])
            decoded.append(decode(data[at : at + length], tables, symbols))
            at += length
        body = b"".join(decoded[1:])
        for i in range(count):
            out += decoded[0][i * size : (i + 1) * size] + body[i * registers * 64 : (i + 1) * registers * 64]
    assert at - start == payload and len(data) == -(-at // 64) * 64 and not any(data[at:])
    return bytes(out)

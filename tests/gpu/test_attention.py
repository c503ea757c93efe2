"""Attention of decoding steps: the kernel compiled for the host."""

import subprocess

import numpy as np
import pytest
import torch
from emulation import Emulator

from moepack.decoding.narrow import decode, encode

TYPES = torch.bfloat16, torch.float16


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator("attention.cpp", tmp_path_factory.mktemp("attention"))


def attention(q, k, v, bias, scale, sinks=None):
    """q [B, heads, D], k and v [B, groups, T, width], bias [B, T], sinks [heads]: [B, heads, width] in float64."""
    q, k, v, bias = (each.double() for each in (q, k, v, bias))
    (batch, heads, _), groups = q.shape, k.shape[1]
    k, v = (each.repeat_interleave(heads // groups, 1) for each in (k, v))
    scores = torch.einsum("bhd,bhtd->bht", q, k) * scale + bias[:, None]
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None].expand(batch, -1, 1)], -1)
    return torch.einsum("bht,bhtd->bhd", scores.softmax(-1)[..., : k.shape[2]], v)


CASES = [  # batch, groups, group, capacity, splits, key width, value width
    (1, 2, 8, 100, 1, 128, 128),
    (2, 1, 4, 130, 3, 64, 64),
    (2, 2, 1, 37, 2, 192, 128),
    (1, 1, 12, 260, 2, 64, 64),
    (1, 1, 2, 9, 5, 256, 256),
]


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_heads_attend_to_visible_tokens(emulator, tmp_path, case, half):
    batch, groups, group, capacity, splits, width, value_width = case
    program = emulator("attention.cu", "none", HALF=half, NARROW=0, KEY_WIDTH=width, VALUE_WIDTH=value_width)
    generator = torch.Generator().manual_seed(capacity)
    shapes = (batch, groups * group, width), *((batch, groups, capacity, size) for size in (width, value_width))
    dtype = TYPES[half]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    bias = torch.zeros(batch, capacity)
    if capacity > 10:  # a window of a padded sequence in a buffer with free slots
        bias[0, : capacity // 3] = bias[:, capacity - 5 :] = torch.finfo(dtype).min
        bias[-1, capacity // 2] = -1.5
    sinks = torch.randn(groups * group, generator=generator).to(dtype) if batch > 1 else None
    given = {"q": q, "k": k, "v": v, "bias": bias.to(dtype), "sinks": sinks}
    for name, tensor in given.items():
        if tensor is not None:
            (tmp_path / name).write_bytes(tensor.view(torch.uint8).numpy().tobytes())
    files = ["-" if tensor is None else str(tmp_path / name) for name, tensor in given.items()]
    scale = width**-0.5
    command = [program, *map(str, (batch, groups, group, capacity, splits, scale)), *files]
    printed = np.frombuffer(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout, np.uint8)
    found = torch.from_numpy(printed.copy()).view(dtype).view(batch, -1, value_width).double()
    expected = attention(q, k, v, bias.to(dtype), scale, sinks)
    assert (found - expected).norm() / expected.norm() < (5e-3, 6e-4)[half]


@pytest.mark.parametrize(("half", "narrow"), [(0, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize(
    ("lengths", "group", "splits", "window"), [([100, 7, 300], 8, 3, 0), ([260, 1], 3, 5, 50), ([130], 1, 1, 0)]
)
def test_sequences_of_several_lengths_attend_in_their_own_rooms(
    emulator, tmp_path, lengths, group, splits, window, half, narrow
):
    batch, groups, capacity, width, dtype = len(lengths), 2, 320, 128 if group == 3 else 64, TYPES[half]
    program = emulator("attention.cu", "none", HALF=half, NARROW=narrow, KEY_WIDTH=width, VALUE_WIDTH=width)
    generator = torch.Generator().manual_seed(group)
    q = torch.randn(batch, groups * group, width, generator=generator).to(dtype)
    k, v = (torch.randn(batch, groups, capacity, width, generator=generator).to(dtype) for _ in range(2))
    if narrow:  # scales of many magnitudes
        v *= torch.logspace(-3, 0, capacity)[:, None]
        stored, (k, v) = (encode(k), encode(v)), (decode(encode(each), torch.float32) for each in (k, v))
    order = torch.arange(batch).flip(0)  # the rooms of the sequences
    bias = torch.full((batch, capacity), torch.finfo(torch.bfloat16).min)
    for number, length in enumerate(lengths):
        bias[number, max(0, length - window) if window else 0 : length] = 0
    expected = attention(q, k[order], v[order], bias, width**-0.5)
    for number, length in enumerate(lengths):
        for each in (k, v):
            each[order[number], :, length:] = torch.nan
        for each in stored if narrow else ():
            each[order[number], :, length:] = -1  # the scale is NaN
    k, v = stored if narrow else (k, v)
    rooms = torch.stack([order, torch.tensor(lengths) - 1])
    for name, tensor in {"q": q, "k": k, "v": v, "rooms": rooms}.items():
        (tmp_path / name).write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    numbers = batch, groups, group, capacity, splits, width**-0.5
    files = (*(tmp_path / name for name in "qkv"), "-", "-", window, tmp_path / "rooms")
    command = [program, *map(str, (*numbers, *files))]
    printed = np.frombuffer(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout, np.uint8)
    found = torch.from_numpy(printed.copy()).view(dtype).view(batch, -1, width).double()
    assert (found - expected).norm() / expected.norm() < 5e-3

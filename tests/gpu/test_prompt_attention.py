"""Attention of prompts: the kernel compiled for the host."""

import subprocess

import numpy as np
import pytest
import torch
from emulation import Emulator
from test_attention import TYPES, attention

from moepack.backends.gpu import prompt_attention
from moepack.decoding.narrow import decode, encode


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator("prompt.cpp", tmp_path_factory.mktemp("prompt"))


CASES = [  # width, groups, group, window, (capacity, tokens before, tokens) of sequences
    (128, 1, 2, 0, [(80, 0, 21), (150, 130, 5)]),
    (64, 2, 3, 0, [(70, 3, 67), (9, 0, 1)]),
    (64, 1, 1, 20, [(230, 100, 90)]),
    (64, 1, 9, 0, [(64, 0, 64)]),
]


@pytest.mark.parametrize(("half", "narrow"), [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("case", CASES)
def test_tokens_attend_to_earlier_ones_of_their_sequence(emulator, tmp_path, case, half, narrow):
    width, groups, group, window, sequences = case
    dtype, generator, heads = TYPES[half], torch.Generator().manual_seed(width + group), groups * group
    in_block, parts = prompt_attention._division(group)
    program = emulator("prompt.cu", "none", HALF=half, NARROW=narrow, WIDTH=width, HEADS=in_block, PARTS=parts)
    tile, rooms, places, expected = prompt_attention.tile_rows(group), [], [], []
    sinks = torch.randn(heads, generator=generator).to(dtype) if group == 2 else None
    queries = []
    for number, (capacity, before, count) in enumerate(sequences):
        q = torch.randn(count, heads, width, generator=generator).to(dtype)
        capacity += -capacity % 4 if narrow else 0
        k, v = (torch.randn(groups, capacity, width, generator=generator).to(dtype) for _ in range(2))
        if narrow:
            stored, (k, v) = (encode(k), encode(v)), (decode(encode(each), torch.float32) for each in (k, v))
        keys, rows = torch.arange(capacity), torch.arange(before, before + count)[:, None]
        seen = (keys <= rows) & ((keys > rows - window) if window else True)
        bias = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        wide = [each[None].expand(count, -1, -1, -1) for each in (k, v)]
        expected.append(attention(q, *wide, bias, width**-0.5, sinks))
        for each in (k, v):  # what free slots hold
            each[:, before + count :] = torch.nan
        if narrow:
            k, v = stored
            k[:, before + count :] = v[:, before + count :] = -1  # the scale is NaN
        rooms.append((k, v, capacity))
        padding = -count % tile
        queries += [q, torch.full((padding, heads, width), 3.0, dtype=dtype)]
        places += [[number, place] for place in (*range(before, before + count), *[-1] * padding)]
    places += [[0, -1]] * tile
    queries.append(torch.zeros(tile, heads, width, dtype=dtype))
    given = {"q": torch.cat(queries), "sinks": sinks, "places": torch.tensor(places).T.contiguous()}
    for number, (k, v, _) in enumerate(rooms):
        given |= {f"k{number}": k, f"v{number}": v}
    for name, tensor in given.items():
        if tensor is not None:
            (tmp_path / name).write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    files = [tmp_path / "q", tmp_path / "sinks" if sinks is not None else "-", tmp_path / "places"]
    for number, (_, _, capacity) in enumerate(rooms):
        files += [tmp_path / f"k{number}", tmp_path / f"v{number}", capacity]
    numbers = len(rooms), len(places), groups, group, window, width**-0.5
    command = [program, *map(str, (*numbers, *files))]
    printed = np.frombuffer(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout, np.uint8)
    found = torch.from_numpy(printed.copy()).view(dtype).view(len(places), heads, width).double()
    assert found.isfinite().all()
    rows = [row for row, (_, place) in enumerate(places) if place >= 0]
    expected = torch.cat(expected)
    assert (found[rows] - expected).norm() / expected.norm() < (5e-3 if narrow or not half else 6e-4)
    assert not found[-tile:].any()

"""The GPU decoders of ternary codes and codebook codes, compiled for the host, yield the core's codes."""

import subprocess

import numpy as np
import pytest
import torch
from emulation import build

from moepack import _core, encode_ternary
from moepack.backends.gpu.ternary import _words


@pytest.fixture(scope="module")
def ternary_program(tmp_path_factory):
    return build("ternary.cpp", tmp_path_factory.mktemp("host") / "ternary")


@pytest.mark.parametrize("positive", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("zeros", [0.45, 0.6, 0.75, 0.82, 0.885, 0.93, 0.97])
def test_words_of_every_kind_of_dictionary_decode_to_the_codes(ternary_program, tmp_path, zeros, positive):
    columns = 6001
    drawn = torch.rand(1, columns, generator=torch.Generator().manual_seed(int(1000 * zeros)))
    codes = (drawn > zeros).to(torch.int8) - 2 * (drawn > zeros + positive * (1 - zeros)).to(torch.int8)
    data = encode_ternary(codes, levels=torch.tensor([[-1.0, 1.0]])).data
    sections = _core.PackedTensor(data).sections()
    field = int(data[sections["index"][0] : sections["index"][0] + 2].view(np.uint16)[0]) >> 12
    words = _words(int(data[14 + (field & 7)]))
    start, length = sections["payload"]
    assert length < -(-columns // 4), "the row is stored raw"
    (tmp_path / "table").write_bytes(words.entries.tobytes())
    (tmp_path / "codes").write_bytes(data[start : start + length].tobytes() + bytes(-length % 8))
    arguments = [tmp_path / "table", tmp_path / "codes", str(columns), str(2 + words.three_slots)]
    printed = subprocess.run([ternary_program, *arguments], stdout=subprocess.PIPE, check=True).stdout
    # Symbol 1 is the negative level unless the row swaps them.
    values = np.array([0, 1, -1, 9] if field >> 3 else [0, -1, 1, 9], np.int8)
    np.testing.assert_array_equal(values[np.frombuffer(printed, np.uint8)], codes[0].numpy())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_into_codebooks_come_in_the_order_of_the_activations(tmp_path, bits):
    random = np.random.default_rng(bits)
    codes = random.integers(0, 1 << bits, (1, 16, 128), dtype=np.uint8)
    centroids = np.zeros((1, 16, 1, 1 << bits), np.int16)
    data = _core.encode_codebook(
        codes, centroids, np.ones((1, 16, 1), np.float32), bits=bits, block=128, ndim=2, activation_bits=8
    )
    (tmp_path / "chunk").write_bytes(data[-16 * 128 * bits // 8 :].tobytes())
    program = build("codebook.cpp", tmp_path / "codebook", f"-DBITS={bits}")
    printed = subprocess.run([program, tmp_path / "chunk"], stdout=subprocess.PIPE, check=True).stdout
    printed = np.frombuffer(printed, np.uint8)
    np.testing.assert_array_equal(printed[2048:].reshape(16, 128), codes[0])
    t, step, part, byte = np.meshgrid(*map(np.arange, (4, 4, 2, 4)), indexing="ij")
    place = 2 * part + byte // 2
    if bits == 2:
        columns = 16 * (2 * t + step // 2) + 8 * (step % 2) + place + 4 * (byte % 2)
    else:
        columns = 32 * step + 4 * t + place + 16 * (byte % 2)
    np.testing.assert_array_equal(printed[:2048].reshape(16, 128), codes[0][:, columns.reshape(-1)])


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_records_of_channels_decode_to_their_values(tmp_path, bits):
    random = np.random.default_rng(bits)
    shape, groups = (1, 9, 2 * 200), 4
    values = torch.randn(shape).bfloat16().view(torch.uint16).numpy()
    if bits < 16:
        scales = torch.rand(1, 9, 2 * groups).bfloat16().float().numpy()
        values = random.integers(0, 1 << bits, shape, dtype=np.uint8), scales
    data = _core.encode_channels(values, np.zeros(1, np.float32), bits=bits)
    start, size = _core.PackedTensor(data).sections()["records"]
    (tmp_path / "records").write_bytes(data[start : start + size].tobytes())
    program = build("channels.cpp", tmp_path / "channels", f"-DBITS={bits}")
    arguments = [tmp_path / "records", str(groups * 8 * bits), str(groups), str(size // 9)]
    printed = subprocess.run([program, *arguments], stdout=subprocess.PIPE, check=True).stdout
    found = np.frombuffer(printed, np.float32).reshape(9, 2, groups * 64)
    np.testing.assert_array_equal(found[:, :, :200].reshape(9, 400), _core.PackedTensor(data).dequantize()[0])
    assert not found[:, :, 200:].any()

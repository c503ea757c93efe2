"""Products with quantized weights of moepack and other PyPI packages, behind one interface for benchmarks.

A peer holds several copies of a matrix, together larger than any cache, and multiplies by all of them in one round.
Packages that are not installed, or lack a kernel, are reported as absent.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moepack import _core

Round = Callable[[], object]


@dataclass
class Peer:
    """Copies of a matrix and a function that multiplies by them.

    Attributes:
        name: package and format.
        nbytes: size of one copy.
        copies: how many a round goes through.
        round_of: for activations [T, C] float32, a function that multiplies by every copy once.
    """

    name: str
    nbytes: int
    copies: int
    round_of: Callable[[torch.Tensor], Round]


@dataclass
class Absent:
    """A peer that is not available, and the reason."""

    name: str
    reason: str


def copies_for(nbytes: int, cold: int) -> int:
    """The number of copies that together have at least `cold` bytes."""
    return max(2, -(-cold // nbytes))


def aligned(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy that starts at a multiple of 4096, like tensors in mapped files."""
    room = np.empty(data.size + 4096, np.uint8)
    start = -room.ctypes.data % 4096
    room[start : start + data.size] = data
    return room[start : start + data.size]


def encode(shape: tuple[int, int, int], bits: int, group: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random weights of experts x rows x columns with scales and offsets in float16."""
    generator = np.random.default_rng(seed)
    experts, rows, columns = shape
    codes = generator.integers(0, 1 << bits, shape, dtype=np.uint8)
    size = (experts, rows, -(-columns // group))
    scales = generator.uniform(0.5, 1, size).astype(np.float16).astype(np.float32) * 2.0**-6
    offsets = -scales * (1 << bits >> 1)
    return _core.encode_groupwise(codes, scales, offsets, bits=bits, group_size=group, ndim=3)


def moepack_peer(rows: int, columns: int, bits: int, group: int, mode: str, isa: str, cold: int) -> Peer:
    """Group-wise integers with offsets, in the layout of a packed directory."""
    data = encode((1, rows, columns), bits, group)
    blobs = [_core.PackedTensor(aligned(data)) for _ in range(copies_for(data.size, cold))]

    def round_of(x: torch.Tensor) -> Round:
        values = x.numpy()
        return lambda: [blob.matmul(values, mode=mode, isa=isa) for blob in blobs]

    return Peer(f"moepack int{bits} group {group} {mode} {isa}", data.size, len(blobs), round_of)


def torch_bf16(rows: int, columns: int, cold: int) -> Peer:
    """Torch's own product of bfloat16."""
    copies = copies_for(2 * rows * columns, cold)
    first = torch.empty(rows, columns, dtype=torch.bfloat16).uniform_(-1, 1)
    weights = [first.clone() for _ in range(copies)]

    def round_of(x: torch.Tensor) -> Round:
        half = x.bfloat16()
        return lambda: [torch.nn.functional.linear(half, weight) for weight in weights]

    return Peer("torch bf16", 2 * rows * columns, copies, round_of)


def torch_int8(rows: int, columns: int, cold: int) -> Peer | Absent:
    """Torch's dynamically quantized linear layer: int8 weights per row, activations per tensor."""
    try:
        torch.backends.quantized.engine = "onednn"
        copies = copies_for(rows * columns, cold)
        codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
        scales, zeros = torch.full((rows,), 0.01, dtype=torch.float64), torch.zeros(rows, dtype=torch.int64)
        weight = torch._make_per_channel_quantized_tensor(codes, scales, zeros, 0)
        packed = [torch.ops.quantized.linear_prepack(weight, None) for _ in range(copies)]
        torch.ops.quantized.linear_dynamic(torch.zeros(1, columns), packed[0])
    except (RuntimeError, AttributeError) as error:
        return Absent("torch int8 dynamic", str(error).splitlines()[0])

    def round_of(x: torch.Tensor) -> Round:
        return lambda: [torch.ops.quantized.linear_dynamic(x, weight) for weight in packed]

    return Peer("torch int8 dynamic", rows * columns, copies, round_of)


def torch_int4(rows: int, columns: int, group: int, cold: int) -> Peer | Absent:
    """Torch's int4 weights with scales and zeros in bfloat16."""
    name = f"torch int4pack group {group}"
    try:
        copies = copies_for(rows * columns // 2, cold)
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.int32)
        first = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        weights = [first.clone() for _ in range(copies)]
        scales = torch.full((columns // group, rows, 2), 0.01, dtype=torch.bfloat16)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        multiply(torch.zeros(1, columns, dtype=torch.bfloat16), weights[0], group, scales)
    except (RuntimeError, AttributeError) as error:
        return Absent(name, str(error).splitlines()[0])

    def round_of(x: torch.Tensor) -> Round:
        half = x.bfloat16()
        return lambda: [multiply(half, weight, group, scales) for weight in weights]

    return Peer(name, rows * columns // 2 + scales.numel() * 2, copies, round_of)


def onnx_session(nodes: list[Any], inputs: list[Any], outputs: list[Any], tensors: list[Any], threads: int) -> Any:
    """A session of onnxruntime over a graph created here."""
    import onnx
    import onnxruntime

    graph = onnx.helper.make_graph(nodes, "bench", inputs, outputs, tensors)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def onnx_tensor(name: str, values: NDArray[Any]) -> Any:
    """An initializer; its bytes must be unique, because onnxruntime silently shares equal ones."""
    from onnx import numpy_helper

    return numpy_helper.from_array(values, name)


def onnx_peer(rows: int, columns: int, bits: int, group: int, threads: int, cold: int) -> Peer | Absent:
    """MatMulNBits of onnxruntime with zeros and int8 activations (accuracy level 4): all copies in one session."""
    name = f"onnxruntime MatMulNBits int{bits} group {group}"
    try:
        from onnx import TensorProto, helper
    except ImportError as error:
        return Absent(name, str(error))
    groups = columns // group
    nbytes = rows * columns * bits // 8 + rows * groups * 4 + rows * groups * bits // 8
    copies = copies_for(nbytes, cold)
    generator = np.random.default_rng(bits)
    pool = generator.integers(0, 256, rows * columns * bits // 8 + copies, dtype=np.uint8)
    levels = generator.uniform(0.01, 0.02, rows * groups + copies).astype(np.float32)
    nodes, tensors, outputs = [], [], []
    for i in range(copies):
        weight = pool[i : i + rows * columns * bits // 8].reshape(rows, groups, -1)
        scales = levels[i : i + rows * groups].reshape(rows, groups)
        zeros = pool[i : i + rows * -(-groups * bits // 8)].reshape(rows, -1)
        parts = {f"w{i}": weight, f"s{i}": scales, f"z{i}": zeros}
        tensors += [onnx_tensor(part, values) for part, values in parts.items()]
        settings = {"K": columns, "N": rows, "bits": bits, "block_size": group, "accuracy_level": 4}
        nodes.append(helper.make_node("MatMulNBits", ["x", *parts], [f"y{i}"], domain="com.microsoft", **settings))
        outputs.append(helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, ["tokens", rows]))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["tokens", columns])]
    try:
        session = onnx_session(nodes, inputs, outputs, tensors, threads)
    except Exception as error:
        return Absent(name, str(error).splitlines()[0])

    def round_of(x: torch.Tensor) -> Round:
        feed = {"x": x.numpy()}
        return lambda: session.run(None, feed)

    return Peer(name, nbytes, copies, round_of)


def auto_round_peer(rows: int, columns: int, bits: int, group: int, cold: int) -> Peer | Absent:
    """The kernels of auto-round-lib, with zeros; the library chooses their compute type."""
    name = f"auto-round-lib int{bits} group {group}"
    try:
        import auto_round_kernel as kernels
    except ImportError as error:
        return Absent(name, str(error))
    low, high = -(1 << bits >> 1), (1 << bits >> 1) - 1
    settings = ("auto" if bits == 8 else "int8", f"int{bits}", "fp32", True)
    try:
        scales = torch.full((columns // group, rows), 0.01)
        zeros = torch.randint(low, high + 1, (columns // group, rows), dtype=torch.int8)
        codes = torch.randint(low, high + 1, (columns, rows), dtype=torch.int8)
        first = kernels.repack_quantized_weight(codes, scales, zeros, group, *settings)
        weights = [first.clone() for _ in range(copies_for(first.numel(), cold))]
        nothing = torch.empty(0)
        kernels.woqgemm(torch.zeros(1, columns), first, nothing, rows, columns, group, *settings)
    except Exception as error:
        return Absent(name, str(error).splitlines()[0])

    def round_of(x: torch.Tensor) -> Round:
        return lambda: [kernels.woqgemm(x, w, nothing, rows, columns, group, *settings) for w in weights]

    return Peer(name, first.numel(), len(weights), round_of)


PACKAGES = ("torch", "onnxruntime", "auto-round-lib", "llama-cpp-python")
"""Distributions of the peers in the order of measurement; the last one contains ggml."""


def linear_peers(
    package: str, rows: int, columns: int, threads: int, cold: int
) -> Iterator[Callable[[], Peer | Absent]]:
    """The products of one matrix that a package supports, to be created one at a time: each takes `cold` bytes."""
    if package == "torch":
        yield lambda: torch_bf16(rows, columns, cold)
        yield lambda: torch_int8(rows, columns, cold)
        yield lambda: torch_int4(rows, columns, 64, cold)
    elif package == "onnxruntime":
        for bits, group in ((4, 64), (4, 128), (2, 128), (8, 128)):
            yield lambda bits=bits, group=group: onnx_peer(rows, columns, bits, group, threads, cold)
    elif package == "auto-round-lib":
        for bits, group in ((4, 128), (3, 64), (2, 64), (8, 128)):
            yield lambda bits=bits, group=group: auto_round_peer(rows, columns, bits, group, cold)


def versions() -> dict[str, str]:
    """Versions of the measured packages, or "absent"."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found

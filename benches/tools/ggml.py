"""Products of ggml as a benchmark peer, from the libraries of llama-cpp-python or xllamacpp.

Weights have llama.cpp's layout: repacked for the processor if ggml has kernels for that, otherwise as in a file. One
graph multiplies all copies on ggml's own threads; ggml itself quantizes activations to int8.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benches.tools.peers import Absent, Peer, Round, copies_for

TYPES = {"q4_0": 2, "q8_0": 8, "q2_K": 10, "q3_K": 11, "q4_K": 12, "iq2_xs": 17, "iq3_xxs": 18, "iq4_xs": 23}
SAMPLE = 128
"""Quantized rows; a matrix repeats them, because ggml takes seconds for some formats."""
TOLERANCE = 0.03
"""Largest relative error of a product that int8 activations explain (0.005 to 0.008 measured)."""


class InitParams(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


DEQUANTIZE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)


class TypeTraits(ctypes.Structure):
    """The beginning of `ggml_type_traits`."""

    _fields_ = [
        ("type_name", c_char_p), ("block", c_int64), ("interleave", c_int64), ("size", c_size_t),
        ("quantized", c_bool), ("dequantize", DEQUANTIZE),
    ]  # fmt: skip


SILENT = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda *_: None)
"""Receives the messages of ggml, one per repacked tensor."""
POINTERS = {
    "ggml_init": [InitParams],
    "ggml_new_tensor_2d": [c_void_p, c_int, c_int64, c_int64],
    "ggml_mul_mat": [c_void_p] * 3,
    "ggml_new_graph": [c_void_p],
    "ggml_get_data": [c_void_p],
    "ggml_backend_alloc_ctx_tensors_from_buft": [c_void_p] * 2,
    "ggml_backend_cpu_init": [],
    "ggml_backend_cpu_buffer_type": [],
    "ggml_backend_cpu_reg": [],
    "ggml_backend_get_device": [c_void_p],
    "ggml_backend_reg_get_proc_address": [c_void_p, c_char_p],
}
"""Functions that return pointers, and their arguments."""
OTHERS = {
    "ggml_free": [c_void_p],
    "ggml_build_forward_expand": [c_void_p] * 2,
    "ggml_backend_cpu_set_n_threads": [c_void_p, c_int],
    "ggml_backend_graph_compute": [c_void_p] * 2,
    "ggml_backend_tensor_set": [c_void_p, c_void_p, c_size_t, c_size_t],
    "ggml_backend_buffer_free": [c_void_p],
    "ggml_backend_dev_supports_op": [c_void_p] * 2,
    "ggml_backend_free": [c_void_p],
}


LIBRARIES = {"llama_cpp": "lib/libggml.so", "xllamacpp": "xllamacpp.abi3.so"}
"""Packages that contain ggml, and its path in them."""


def opened(libraries: Mapping[str, str]) -> ctypes.CDLL:
    """The library of the first installed package; ImportError if none is installed."""
    specs = ((importlib.util.find_spec(package), file) for package, file in libraries.items())
    found = [Path(spec.origin).parent / file for spec, file in specs if spec is not None and spec.origin is not None]
    if not found:
        raise ImportError(f"none of {', '.join(libraries)} is installed")
    return ctypes.CDLL(str(found[0]))


def load() -> ctypes.CDLL:
    """ggml with declared function types; ImportError if no package with it is installed."""
    library = opened(LIBRARIES)
    for names, result in ((POINTERS, c_void_p), (OTHERS, c_int)):
        for name, arguments in names.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
    library.ggml_quantize_chunk.argtypes = [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]
    library.ggml_quantize_chunk.restype = library.ggml_row_size.restype = c_size_t
    library.ggml_row_size.argtypes = [c_int, c_int64]
    library.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
    library.ggml_backend_dev_supports_op.restype = c_bool
    library.ggml_log_set(SILENT, None)
    return library


def quantized(
    library: ctypes.CDLL, kind: int, values: NDArray[np.float32], importance: NDArray[np.float32]
) -> NDArray[np.uint8]:
    """Blocks [R, bytes] of values [R, C] in a type; `importance` [C] weights the error of each column."""
    rows, columns = values.shape
    blocks = np.empty((rows, library.ggml_row_size(kind, columns)), np.uint8)
    source, target, given = values.ctypes.data, blocks.ctypes.data, importance.ctypes.data
    library.ggml_quantize_chunk(kind, source, target, 0, rows, columns, given)
    return blocks


def dequantized(library: ctypes.CDLL, kind: int, blocks: NDArray[np.uint8], columns: int) -> NDArray[np.float32]:
    """Values [R, C] of blocks [R, bytes] of a type."""
    values = np.empty((len(blocks), columns), np.float32)
    library.ggml_get_type_traits(kind).contents.dequantize(blocks.ctypes.data, values.ctypes.data, values.size)
    return values


class Matrices:
    """Copies of one matrix in a buffer of ggml, and graphs that multiply by all of them."""

    def __init__(self, library: ctypes.CDLL, kind: str, rows: int, columns: int, threads: int, cold: int) -> None:
        self.library, self.type = library, TYPES[kind]
        self.rows, self.columns = rows, columns
        self.nbytes = rows * self.library.ggml_row_size(self.type, columns)
        self.backend = self.library.ggml_backend_cpu_init()
        self.library.ggml_backend_cpu_set_n_threads(self.backend, threads)
        self.device = self.library.ggml_backend_get_device(self.backend)
        self.graph_context: int | None = None
        data, self.sample = self.quantized()
        repacking = next(filter(self.supported, self.buffer_kinds()), None)
        self.repacked = repacking is not None
        kept = repacking or self.library.ggml_backend_cpu_buffer_type()
        self.context, self.weights, self.buffer = self.allocate(kept, copies_for(self.nbytes, cold))
        for weight in self.weights:
            self.library.ggml_backend_tensor_set(weight, data.ctypes.data, 0, self.nbytes)

    def __del__(self) -> None:
        """Free the memory for the next peer."""
        for context in (self.graph_context, self.context):
            if context:
                self.library.ggml_free(context)
        self.library.ggml_backend_buffer_free(self.buffer)
        self.library.ggml_backend_free(self.backend)

    def quantized(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Blocks of a random matrix and the values of its first rows, which repeat."""
        values = np.random.default_rng(0).standard_normal((SAMPLE, self.columns)).astype(np.float32)
        blocks = quantized(self.library, self.type, values, np.ones(self.columns, np.float32))
        sample = dequantized(self.library, self.type, blocks, self.columns)
        return np.tile(blocks, (-(-self.rows // SAMPLE), 1))[: self.rows].copy(), sample

    def buffer_kinds(self) -> list[int]:
        """Types of buffers that repack weights for this processor as they are set, best first."""
        address = self.library.ggml_backend_reg_get_proc_address(
            self.library.ggml_backend_cpu_reg(), b"ggml_backend_dev_get_extra_bufts"
        )
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(address)(self.device)
        return list(takewhile(bool, kinds)) if kinds else []

    def allocate(self, kind: int, count: int) -> tuple[int, list[int], int]:
        """Allocate a context, tensors of the weights' shape, and their buffer."""
        context = self.library.ggml_init(InitParams(1 << 20, None, True))
        tensors = [self.library.ggml_new_tensor_2d(context, self.type, self.columns, self.rows) for _ in range(count)]
        return context, tensors, self.library.ggml_backend_alloc_ctx_tensors_from_buft(context, kind)

    def supported(self, kind: int) -> bool:
        """Whether a product supports weights in this type of buffer."""
        context, (weight,), buffer = self.allocate(kind, 1)
        x = self.library.ggml_new_tensor_2d(context, 0, self.columns, 1)
        product = self.library.ggml_mul_mat(context, weight, x)
        answer = bool(self.library.ggml_backend_dev_supports_op(self.device, product))
        self.library.ggml_backend_buffer_free(buffer)
        self.library.ggml_free(context)
        return answer

    def round_of(self, x: torch.Tensor) -> Round:
        """A function that multiplies activations [T, C] by every copy, checked against the dequantized weights."""
        if self.graph_context:
            self.library.ggml_free(self.graph_context)
        size = 4 * len(x) * (self.columns + (self.rows + 64) * len(self.weights)) + (4 << 20)
        context = self.graph_context = self.library.ggml_init(InitParams(size, None, False))
        given = self.library.ggml_new_tensor_2d(context, 0, self.columns, len(x))
        values = np.ascontiguousarray(x.numpy())
        ctypes.memmove(self.library.ggml_get_data(given), values.ctypes.data, values.nbytes)
        graph = self.library.ggml_new_graph(context)
        products = [self.library.ggml_mul_mat(context, weight, given) for weight in self.weights]
        for product in products:
            self.library.ggml_build_forward_expand(graph, product)
        if self.library.ggml_backend_graph_compute(self.backend, graph):
            raise RuntimeError("ggml_backend_graph_compute fails")
        self.check(values, products[-1])
        return lambda: self.library.ggml_backend_graph_compute(self.backend, graph)

    def check(self, x: NDArray[np.float32], product: int) -> None:
        """Compare the last complete samples; the speed of a wrong product is meaningless."""
        address = self.library.ggml_get_data(product)
        y = np.ctypeslib.as_array((c_float * (len(x) * self.rows)).from_address(address)).reshape(len(x), self.rows)
        start = self.rows // SAMPLE * SAMPLE - SAMPLE
        expected = x @ self.sample.T
        error = np.linalg.norm(y[:, start : start + SAMPLE] - expected) / np.linalg.norm(expected)
        if not error < TOLERANCE:
            raise RuntimeError(f"products are off by {error:.3f}")


def ggml_peer(kind: str, rows: int, columns: int, threads: int, cold: int) -> Peer | Absent:
    """A format of ggml; absent if no package with ggml is installed."""
    try:
        library = load()
    except (ImportError, OSError, AttributeError) as error:
        return Absent(f"ggml {kind}", str(error).splitlines()[0])
    matrices = Matrices(library, kind, rows, columns, threads, cold)
    name = f"ggml {kind}, {'repacked' if matrices.repacked else 'as in a file'}"
    return Peer(name, matrices.nbytes, len(matrices.weights), matrices.round_of)


def ggml_peers(rows: int, columns: int, threads: int, cold: int) -> Iterator[Callable[[], Peer | Absent]]:
    """All formats, to be created one at a time: each takes `cold` bytes."""
    for kind in TYPES:
        yield partial(ggml_peer, kind, rows, columns, threads, cold)

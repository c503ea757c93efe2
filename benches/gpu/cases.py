"""The cases of check.py and speed.py: families of kernels with packed tensors of random weights.

A family is a module beside this one with `SPECIFICATIONS`, a name and a function for each kind of tensor:
`make(experts, rows, columns, seed)` gives the bytes, with values of about
`columns ** -0.5`, so that products are about one. A family whose products round activations has `ERROR`, the bound of
their relative errors, and `LINEAR_ERROR` where linear layers have another; where a tensor says how activations are
rounded, `seen(details, x)` is what is left of them.
"""

from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moepack import _core
from moepack.backends.gpu.backend import REARRANGED
from moepack.backends.gpu.families import FAMILIES as MODULES
from moepack.backends.gpu.families import kernels_of
from moepack.backends.gpu.matrix import DeviceMatrix

FAMILIES = ("groupwise", "ternary", "codebook", "coded")

Make = partial[NDArray[np.uint8]]


def specifications(families: list[str]) -> dict[str, Make]:
    """The kinds of tensor of several families by name; none for a family whose module is missing."""
    found: dict[str, Make] = {}
    for family in families:
        try:
            found |= import_module(f"{__package__}.{family}").SPECIFICATIONS
        except ModuleNotFoundError as error:
            if error.name != f"{__package__}.{family}":
                raise
            print(f"no cases of {family}")
    return found


def on_device(data: NDArray[np.uint8]) -> DeviceMatrix:
    """Copy a packed tensor to the GPU and prepare it."""
    opened = _core.PackedTensor(data)
    bytes_ = torch.from_numpy(REARRANGED.get(opened.kind, np.array)(data)).cuda()
    matrix = DeviceMatrix(bytes_, opened.shape, opened.kind, opened.format, opened.details(), opened.sections())
    kernels_of(matrix.kind).prepare(matrix)
    return matrix


def seen(matrix: DeviceMatrix, x: torch.Tensor) -> torch.Tensor:
    """The activations [N, C] as the products of a matrix see them, float64."""
    rounded = getattr(import_module(f"{__package__}.{MODULES[matrix.kind]}"), "seen", None)
    return rounded(matrix.details, x) if rounded else x.double()


def copies(matrix: DeviceMatrix, count: int) -> list[DeviceMatrix]:
    """A packed tensor and enough copies that none stays in the cache."""
    fields = matrix.shape, matrix.kind, matrix.format, matrix.details, matrix.sections
    found = [matrix]
    for _ in range(count - 1):
        tables = {name: table.clone() for name, table in matrix.tables.items()}
        found.append(DeviceMatrix(matrix.data.clone(), *fields, tables=tables))
    return found


def routing(tokens: int, top_k: int, experts: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Different random experts for each token, and their weights."""
    scores = torch.rand(tokens, experts, generator=generator)
    weights, index = scores.topk(top_k, dim=-1)
    return index.cuda(), (weights / weights.sum(-1, keepdim=True)).cuda()


def device_name() -> dict[str, Any]:
    """The device and versions that the figures depend on."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def repeated(data: NDArray[np.uint8], experts: int, rows: int) -> NDArray[np.uint8]:
    """Make a larger tensor by repeating blocks of 16 rows.

    Args:
        data: a tensor of one expert, whose header of 128 bytes has the numbers of experts and rows at bytes 16 and 24.
        experts: of the result.
        rows: of an expert of the result.
    """
    header = data[:128].copy()
    sizes = header[16:32].view(np.uint64)
    blocks = data[128:].reshape(-(-int(sizes[1]) // 16), -1)
    sizes[:] = experts, rows
    return np.concatenate([header, np.resize(blocks, (experts * -(-rows // 16), blocks.shape[1])).reshape(-1)])

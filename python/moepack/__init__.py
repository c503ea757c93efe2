"""moepack: compress Mixture-of-Experts checkpoints and run them packed.

Names are imported on first use from the modules in `_EXPORTS`, so that `import moepack` stays fast. Errors are imported
immediately, because every program needs them.
"""

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from moepack.errors import (
    CalibrationError,
    CheckpointError,
    ClusterError,
    CorruptionError,
    DeviceError,
    DeviceMemoryError,
    DiskError,
    DownloadError,
    InvalidTensorError,
    LoadError,
    MoepackError,
    MoepackWarning,
    NonFiniteError,
    OutputExistsError,
    ReferenceMismatchError,
    ResumeError,
    SerializationError,
    TextError,
    TokenError,
    UnsupportedModelError,
    UploadError,
)
from moepack.integrations import register

if TYPE_CHECKING:
    from moepack._core import __version__
    from moepack.backends.compute import compute_mode, set_compute_mode
    from moepack.bits import pack_int3, unpack_int3
    from moepack.checkpoint import Checkpoint, describe
    from moepack.codebook import CodebookTensor, encode_codebook, lut_matmul
    from moepack.coded import CodedTensor, encode_coded
    from moepack.evaluation import EvaluationReport, Reference, evaluate, record_reference
    from moepack.format import PackedDirectory, VerifyReport, verify
    from moepack.groupwise import GroupwiseTensor, encode_groupwise
    from moepack.integrations.loading import load
    from moepack.integrations.options import LoadOptions
    from moepack.pipeline import CompressReport, compress
    from moepack.solvers.groupwise import quantize_groupwise
    from moepack.solvers.rtn import quantize_ternary
    from moepack.ternary import TernaryTensor, encode_ternary

__all__ = [
    "CalibrationError",
    "Checkpoint",
    "CheckpointError",
    "ClusterError",
    "CodebookTensor",
    "CodedTensor",
    "CompressReport",
    "CorruptionError",
    "DeviceError",
    "DeviceMemoryError",
    "DiskError",
    "DownloadError",
    "EvaluationReport",
    "GroupwiseTensor",
    "InvalidTensorError",
    "LoadError",
    "LoadOptions",
    "MoepackError",
    "MoepackWarning",
    "NonFiniteError",
    "OutputExistsError",
    "PackedDirectory",
    "Reference",
    "ReferenceMismatchError",
    "ResumeError",
    "SerializationError",
    "TernaryTensor",
    "TextError",
    "TokenError",
    "UnsupportedModelError",
    "UploadError",
    "VerifyReport",
    "__version__",
    "compress",
    "compute_mode",
    "describe",
    "encode_codebook",
    "encode_coded",
    "encode_groupwise",
    "encode_ternary",
    "evaluate",
    "load",
    "lut_matmul",
    "pack_int3",
    "quantize_groupwise",
    "quantize_ternary",
    "record_reference",
    "set_compute_mode",
    "unpack_int3",
    "verify",
]

_EXPORTS = {
    "__version__": "moepack._core",
    "Checkpoint": "moepack.checkpoint",
    "CodebookTensor": "moepack.codebook",
    "CodedTensor": "moepack.coded",
    "CompressReport": "moepack.pipeline",
    "EvaluationReport": "moepack.evaluation",
    "GroupwiseTensor": "moepack.groupwise",
    "LoadOptions": "moepack.integrations.options",
    "PackedDirectory": "moepack.format",
    "Reference": "moepack.evaluation",
    "TernaryTensor": "moepack.ternary",
    "VerifyReport": "moepack.format",
    "compress": "moepack.pipeline",
    "compute_mode": "moepack.backends.compute",
    "describe": "moepack.checkpoint",
    "encode_codebook": "moepack.codebook",
    "encode_coded": "moepack.coded",
    "encode_groupwise": "moepack.groupwise",
    "encode_ternary": "moepack.ternary",
    "evaluate": "moepack.evaluation",
    "load": "moepack.integrations.loading",
    "lut_matmul": "moepack.codebook",
    "pack_int3": "moepack.bits",
    "record_reference": "moepack.evaluation",
    "quantize_groupwise": "moepack.solvers.groupwise",
    "quantize_ternary": "moepack.solvers.rtn",
    "set_compute_mode": "moepack.backends.compute",
    "unpack_int3": "moepack.bits",
    "verify": "moepack.format",
}


def _refuse_other_interpreters() -> None:
    """Reject subinterpreters: they would share the core's classes with the main interpreter without a lock."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # since Python 3.13, and before
        with suppress(ModuleNotFoundError):
            interpreters: Any = import_module(name)
            if interpreters.get_current() != interpreters.get_main():
                raise ImportError("moepack runs in the main interpreter only; use threads or processes")
            return


_refuse_other_interpreters()


def __getattr__(name: str) -> Any:
    """Import an exported name on first use (PEP 562)."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'moepack' has no attribute '{name}'")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})


register()

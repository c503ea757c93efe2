"""The exceptions that moepack raises, grouped by what the caller can do about them.

All derive from `MoepackError`, so `except MoepackError` catches every expected failure. A class also derives from the
builtin exception with the same meaning (`ValueError`, `FileExistsError`, `OSError`), if there is one. Messages name the
file and the tensor at fault, if any; the attributes `file` and `tensor` hold them for programs.

A plain `ValueError` or `TypeError` is raised only for arguments that are invalid regardless of the data.
"""

from os import PathLike, fspath
from typing import Self

__all__ = [
    "CalibrationError",
    "CheckpointError",
    "ClusterError",
    "CorruptionError",
    "DeviceError",
    "DeviceMemoryError",
    "DiskError",
    "DownloadError",
    "InvalidTensorError",
    "LoadError",
    "MoepackError",
    "MoepackWarning",
    "NonFiniteError",
    "OutputExistsError",
    "OverrideError",
    "RecipeError",
    "ReferenceMismatchError",
    "ResumeError",
    "SerializationError",
    "TextError",
    "TokenError",
    "UnsupportedModelError",
    "UploadError",
]


class MoepackError(Exception):
    """Base class of all errors of this package.

    Attributes:
        file: path of the file at fault, or None.
        tensor: name of the tensor at fault, or None.
    """

    file: str | None
    tensor: str | None

    def __init__(self, message: str, *, file: str | PathLike[str] | None = None, tensor: str | None = None) -> None:
        self.file = None if file is None else fspath(file)
        self.tensor = tensor
        self.detail = message
        places = [self.file, None if tensor is None else f"tensor '{tensor}'"]
        super().__init__(": ".join([place for place in places if place is not None] + [message]))

    def at(self, file: str | PathLike[str]) -> Self:
        """Return this error if it names a file, otherwise a copy that names `file`."""
        if self.file is not None:
            return self
        return type(self)(self.detail, file=file, tensor=self.tensor)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.detail, self.file, self.tensor)


def _rebuild(kind: type[MoepackError], detail: str, file: str | None, tensor: str | None) -> MoepackError:
    """Unpickle an error. The default protocol does not support keyword-only arguments."""
    return kind(detail, file=file, tensor=tensor)


class MoepackWarning(UserWarning):
    """A problem in the input that does not stop the work."""


class CheckpointError(MoepackError):
    """The source checkpoint cannot be read: a missing or damaged shard, a wrong index, no config."""


class DownloadError(CheckpointError):
    """A model on the Hub cannot be listed or downloaded: no access, no connection, or other bytes than listed."""


class UploadError(MoepackError):
    """A packed directory cannot be uploaded to the Hub: no access or no connection."""


class UnsupportedModelError(MoepackError):
    """The checkpoint is valid, but moepack does not support its architecture or weight format."""


class CorruptionError(MoepackError, ValueError):
    """A packed file contradicts its format or its checksums."""


class InvalidTensorError(MoepackError, ValueError):
    """A tensor cannot be quantized or encoded: it has NaN, infinity, a wrong shape or a wrong dtype."""


class OutputExistsError(MoepackError, FileExistsError):
    """The output already exists. moepack never overwrites it."""


class OverrideError(MoepackError, ValueError):
    """Bits by name do not fit the model or the method: a pattern that matches nothing, or bits that it cannot give."""


class RecipeError(MoepackError, ValueError):
    """A recipe cannot be read, or has an entry or a value that compress does not know."""


class CalibrationError(MoepackError, ValueError):
    """The calibration text or the model's output on it is unusable: empty, binary, outside the vocabulary, NaN."""


class TextError(MoepackError, ValueError):
    """A text file cannot be read or is not text: binary, or neither UTF-8 nor marked with a byte order mark."""


class DeviceMemoryError(MoepackError, MemoryError):
    """A device ran out of memory, even with the smallest unit of work."""


class ClusterError(MoepackError):
    """A job cannot run on a cluster: no Ray, no cluster, a different version on a node, a file that a node lacks."""


class ResumeError(MoepackError):
    """An unfinished output belongs to a different model, method or setting."""


class DiskError(MoepackError, OSError):
    """Writing failed: the disk is full, read-only or missing."""


class LoadError(MoepackError):
    """A packed directory is intact but cannot be loaded as requested."""


class DeviceError(LoadError):
    """A GPU cannot be used: none is present, the GPU or its driver is too old, or a kernel failed."""


class ReferenceMismatchError(MoepackError, ValueError):
    """A recorded reference belongs to a different text, tokenizer, vocabulary or kind of model."""


class SerializationError(MoepackError):
    """A loaded model cannot be saved as a packed directory."""


class TokenError(MoepackError, ValueError):
    """A token id is not a row of the model's embedding.

    Attributes:
        token: the token id, or None if it is not known.
        rows: number of rows of the embedding.
    """

    token: int | None = None
    rows: int = 0


class NonFiniteError(MoepackError, FloatingPointError):
    """The logits or the loss of a model are NaN or infinite."""

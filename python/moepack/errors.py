"""Every error that moepack raises on purpose, sorted by what the caller can do about it.

All derive from `MoepackError`, so `except MoepackError` catches exactly the failures that moepack foresaw; where a
builtin says the same (`ValueError`, `FileExistsError`, `OSError`), the class derives from that too. A message always
names the file and the tensor when there are any, and `file` and `tensor` carry them for programs.

A plain `ValueError` or `TypeError` is raised only for an argument that has no meaning whatever the data are.
"""

from os import PathLike, fspath

__all__ = [
    "CalibrationError",
    "CheckpointError",
    "ClusterError",
    "CorruptionError",
    "DeviceError",
    "DeviceMemoryError",
    "DiskError",
    "InvalidTensorError",
    "LoadError",
    "MoepackError",
    "MoepackWarning",
    "NonFiniteError",
    "OutputExistsError",
    "ReferenceMismatchError",
    "ResumeError",
    "SerializationError",
    "TextError",
    "TokenError",
    "UnsupportedModelError",
]


class MoepackError(Exception):
    """Base of every error of this package.

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

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.detail, self.file, self.tensor)


def _rebuild(kind: type[MoepackError], detail: str, file: str | None, tensor: str | None) -> MoepackError:
    """Unpickle an error: keyword-only arguments are out of the default protocol's reach."""
    return kind(detail, file=file, tensor=tensor)


class MoepackWarning(UserWarning):
    """Something that the user should know of what was given, while the work goes on."""


class CheckpointError(MoepackError):
    """The source checkpoint cannot be read: a missing or damaged shard, an index that points elsewhere, no config."""


class UnsupportedModelError(MoepackError):
    """The checkpoint is sound, but moepack has no adapter for its architecture or its weight format."""


class CorruptionError(MoepackError, ValueError):
    """A packed file contradicts its format or its checksums."""


class InvalidTensorError(MoepackError, ValueError):
    """A tensor holds what cannot be quantized or encoded: NaN, infinity, a wrong shape or dtype."""


class OutputExistsError(MoepackError, FileExistsError):
    """The output directory exists; nothing is ever overwritten."""


class CalibrationError(MoepackError, ValueError):
    """The calibration text or the model's answer to it is unusable: empty, binary, out of the vocabulary, NaN."""


class TextError(MoepackError, ValueError):
    """A text file cannot be read, or is not text: binary, or in an encoding without a byte order mark but UTF-8."""


class DeviceMemoryError(MoepackError, MemoryError):
    """A device ran out of memory even with the smallest groups of work."""


class ClusterError(MoepackError):
    """Machines that were to share a job cannot: no Ray, no cluster, another version there, a file they do not see."""


class ResumeError(MoepackError):
    """An unfinished output belongs to another model, method or setting."""


class DiskError(MoepackError, OSError):
    """Writing failed: the disk is full, read-only or gone."""


class LoadError(MoepackError):
    """A packed directory is sound but cannot become the model that was asked for."""


class DeviceError(LoadError):
    """A GPU cannot do what was asked for: there is none, its driver or the GPU is too old, a kernel fails."""


class ReferenceMismatchError(MoepackError, ValueError):
    """A recorded reference belongs to another text, tokenizer, vocabulary or kind of model."""


class SerializationError(MoepackError):
    """A loaded model cannot be written back as a packed directory."""


class TokenError(MoepackError, ValueError):
    """A token is not the number of a row of the model's embedding.

    Attributes:
        token: its id; None where the error says no more than its message.
        rows: of the embedding.
    """

    token: int | None = None
    rows: int = 0


class NonFiniteError(MoepackError, FloatingPointError):
    """A model computes NaN or infinity where its logits or its loss must be numbers."""

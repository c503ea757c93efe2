"""Reads a Hugging Face checkpoint directory lazily: config.json and shards of safetensors or PyTorch pickles.

`safe_open` is not sufficient, because the directory is untrusted and the index decides which files are opened. This
reader validates every header when it opens the checkpoint (see `header`, `pickles`), ensures that every name is in
exactly one shard, and maps a tensor's bytes only while the tensor is alive.

Invariants of an open `Checkpoint`:

* every shard is a plain file name inside the directory (the file itself may be a symbolic link: a snapshot in the Hub's
  cache consists of links into its `blobs` directory);
* every tensor listed in the index exists in its shard, possibly with another prefix, and no tensor exists twice;
* no tensor data have been read.
"""

import copy
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from moepack.checkpoint.pickles import PICKLED, read_pickle
from moepack.checkpoint.shards import ShardFiles
from moepack.errors import CheckpointError, UnsupportedModelError
from moepack.format.header import Header, TensorInfo, read_header
from moepack.format.hub import ADAPTER, INDEX
from moepack.format.regular import read_json
from moepack.format.side import may_hold_weights
from moepack.format.weights import NAMED, pickle_files, weight_files

if TYPE_CHECKING:
    from moepack.checkpoint.model import Part

__all__ = ["Checkpoint", "check_listed", "read_config"]


class Checkpoint:
    """An open checkpoint directory.

    Attributes:
        path: the directory.
        config: the parsed config.json.
        shards: the validated headers, by file name in sorted order.
        files: returns the bytes of the shards.
        notes: notes for the user on how the checkpoint is read, in full sentences.
    """

    path: Path
    config: dict[str, Any]
    shards: Mapping[str, Header]
    notes: tuple[str, ...] = ()

    def __init__(
        self, path: Path, config: dict[str, Any], shards: Mapping[str, Header], files: ShardFiles | None = None
    ) -> None:
        self.path = path
        self.config = config
        self.shards = shards
        self.files = files or ShardFiles(shards)
        self._tensors = _merge(shards)

    @classmethod
    def open(cls, path: str | PathLike[str]) -> "Checkpoint":
        """Open `path` and validate all headers. No tensor is read.

        Args:
            path: a directory with config.json and model.safetensors, pytorch_model.bin, or the index of either with its
                shards. Of both, safetensors are read.

        Raises:
            CheckpointError: a file is missing, unreadable, truncated or contradicts another one.
            UnsupportedModelError: the weights are stored only in other files (`consolidated.00.pth`).
        """
        directory = Path(path)
        if directory.is_file():
            raise CheckpointError("is a file, but none of safetensors, PyTorch or GGUF", file=directory)
        if not directory.is_dir():
            what = "file" if directory.suffix == ".gguf" else "directory"
            raise CheckpointError(f"no such {what}, and not a Hub id (ORGANIZATION/NAME)", file=directory)
        if (directory / ADAPTER).is_file() and not (directory / "config.json").exists():
            message = "is a peft adapter, not a model: merge it into its base model first (`merge_and_unload`)"
            raise CheckpointError(message, file=directory)
        config = read_config(directory)
        files = weight_files(directory)
        pickles = {} if files else pickle_files(directory)
        if not files and not pickles:
            raise _no_weights(directory)
        shards = {name: read_header(directory / name) for name in files}
        shards |= {name: read_pickle(directory / name) for name in pickles}
        files |= pickles
        for shard, tensors in files.items():
            check_listed(tensors, shards[shard])
        opened = cls(directory, config, shards)
        opened.notes = (PICKLED,) if pickles else ()
        return opened

    def renamed(self, names: Mapping[str, str], notes: tuple[str, ...]) -> "Checkpoint":
        """Return a checkpoint with the same tensors under other names.

        Args:
            names: maps each tensor to its new, unique name.
            notes: notes of the new checkpoint.
        """
        made = copy.copy(self)
        made._tensors = {names[name]: replace(info, name=names[name]) for name, info in self._tensors.items()}
        made.notes = notes
        return made

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, by shard in the order of their data."""
        return tuple(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self._tensors)} tensors, {len(self.shards)} files)"

    def info(self, name: str) -> TensorInfo:
        """Return shape, dtype and place of a tensor.

        Raises:
            CheckpointError: the tensor does not exist.
        """
        info = self._tensors.get(name)
        if info is None:
            raise CheckpointError("no such tensor in the checkpoint", file=self.path, tensor=name)
        return info

    def stored_bytes(self, name: str) -> int:
        """Return the stored bytes of a tensor. Errors as for `info`."""
        return self.info(name).nbytes

    def stored_infos(self, name: str) -> tuple[TensorInfo, ...]:
        """Return the places of the stored tensors that a tensor is computed from. Errors as for `info`."""
        return (self.info(name),)

    @property
    def stored(self) -> int:
        """Stored bytes of all tensors."""
        return sum(map(self.stored_bytes, self.names()))

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor, mapped from its shard. Pages are read on access and released with the tensor.

        The mapping is private: writes to the tensor never reach the file.

        Raises:
            CheckpointError: the tensor does not exist, or its file changed after the checkpoint was opened.
        """
        return self.mapped(self.info(name))

    def mapped(self, info: TensorInfo) -> torch.Tensor:
        """Return the tensor at a place in the shards. Errors as for `tensor`."""
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        data = self.files.raw(replace(info, nbytes=info.span))
        if info.offset % info.dtype.itemsize:
            # A file may place data at any offset, but torch's kernels assume aligned elements.
            data = data.copy()
        values = torch.from_numpy(data).view(info.dtype)
        return values.reshape(info.shape) if info.strides is None else values.as_strided(info.shape, info.strides)

    def part(self, name: str, expert: int) -> torch.Tensor:
        """Return one matrix of a tensor that stacks experts, as `tensor` does. Only the matrix is read."""
        info = self.info(name)
        count = info.shape[0]
        if not 0 <= expert < count:
            raise IndexError(f"expert index {expert} is out of range: '{name}' has {count} experts")
        return self.mapped(info.at(expert))

    def matrix(self, part: "Part", device: torch.device | None = None) -> torch.Tensor:
        """Return a part of a tensor, on a device, or mapped as by `tensor`. Errors as for `tensor`."""
        expert, place = part.split()
        value = place.of(self.tensor(part.tensor) if expert is None else self.part(part.tensor, expert))
        return value if device is None else value.to(device)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of the tensor, shape (nbytes,), mapped from the file if they are contiguous in it.

        Raises:
            CheckpointError: the tensor does not exist, or its file changed after the checkpoint was opened.
        """
        info = self.info(name)
        if info.nbytes == 0:
            return np.empty(0, dtype=np.uint8)
        if info.strides is None:
            return self.files.raw(info)
        data: npt.NDArray[np.uint8] = self.mapped(info).contiguous().reshape(-1).view(torch.uint8).numpy()
        return data

    def expect(self, groups: Sequence[Collection[str]]) -> None:
        """Announce the tensors that will be read, in order, so that a model on the hub is downloaded ahead.

        Tensors of a group are read together.
        """
        self.files.expect([[info for name in group for info in self.stored_infos(name)] for group in groups])

    def gather(self, names: Iterable[str]) -> None:
        """Announce tensors that are read now and again at the end of a job."""
        self.files.gather([info for name in names for info in self.stored_infos(name)])

    def release(self, names: Iterable[str]) -> None:
        """Announce that tensors given to `gather` are no longer needed."""
        self.files.release([info for name in names for info in self.stored_infos(name)])

    def stamps(self) -> dict[str, str]:
        """Return the file system stamp of each shard at opening time. A later write changes it."""
        return {name: header.stamp for name, header in self.shards.items()}

    def fingerprint(self) -> str:
        """Return a SHA-256 hex digest that identifies the checkpoint.

        It covers config.json, the names, sizes and headers of the shards, and up to 64 evenly spaced blocks of 4 KiB in
        each shard. It is cheap for any size and differs between training runs of the same architecture, but does not
        replace a checksum of every byte.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        digest.update(hashlib.sha256((self.path / "config.json").read_bytes()).digest())
        for name, header in self.shards.items():
            digest.update(f"{name}\n{header.size}\n{header.digest}\n".encode())
            digest.update(self.files.sampled(name))
        return digest.hexdigest()


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        CheckpointError: it is missing or damaged, or names no model type.
    """
    config = read_json(directory / "config.json", CheckpointError)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError("has no model_type", file=directory / "config.json")
    config.pop(NAMED, None)  # the files of a packed directory have other names
    return config


def check_listed(tensors: Iterable[str], header: Header) -> None:
    """Check that a shard has the tensors listed in the index.

    The index may use another prefix, because transformers takes the names from the shards.
    """
    missing = [tensor for tensor in tensors if tensor not in header.tensors]
    ends = {end for name in header.tensors for end in _ends(name)} if missing else set()
    for tensor in missing:
        if tensor not in ends and not any(end in header.tensors for end in _ends(tensor)):
            raise CheckpointError("listed in the index, absent in the shard", file=header.file, tensor=tensor)


def _ends(name: str) -> Iterator[str]:
    """Yield a name without its first one, two, ... components."""
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(1, len(parts)))


def _merge(shards: Mapping[str, Header]) -> dict[str, TensorInfo]:
    """Merge the tables of all shards. A name in two shards is an error, because it is ambiguous."""
    tensors: dict[str, TensorInfo] = {}
    for header in shards.values():
        for name, info in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"is also in {tensors[name].file.name}", file=header.file, tensor=name)
            tensors[name] = info
    return tensors


def _no_weights(directory: Path) -> Exception:
    """Return the error for a directory without safetensors weights, depending on the files that it has."""
    names = sorted(file.name for file in directory.iterdir() if may_hold_weights(file.name))
    pickles = [name for name in names if _is_pickled(name)]
    if "noexp.pt" in names:
        return UnsupportedModelError(
            "is a model in the QMoE authors' format: convert it with `moepack convert`", file=directory
        )
    if pickles:
        return UnsupportedModelError(
            f"holds its weights only as pickles ({pickles[0]}); load it with transformers and save it with "
            "save_pretrained, which writes safetensors",
            file=directory,
        )
    found = f"; it has {', '.join(names[:3])}{' and others' * (len(names) > 3)}" if names else ""
    return CheckpointError(f"holds neither model.safetensors nor {INDEX}{found}", file=directory)


def _is_pickled(name: str) -> bool:
    """Return whether a file name is that of pickled weights, and not of a trainer's state."""
    pickle = name.endswith((".bin", ".bin.index.json", ".pt", ".pth"))
    return pickle and not name.startswith(("optimizer", "scheduler", "scaler", "rng_state", "training_args", "adapter"))

"""A cache of measured sensitivities, so that a model and a text are measured once for all sizes and dry runs.

The files are in the user's cache directory. Their names are digests of the contents of model and text. Any file may be
deleted.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moepack.calibration.fisher import LENGTH, WINDOWS, Sensitivity
from moepack.calibration.samples import Samples
from moepack.checkpoint import Checkpoint
from moepack.system import files
from moepack.system.folders import cache_folder

__all__ = ["KeptSensitivity"]

MOST = 16
"""Maximum number of files; the oldest are deleted."""

FORM = "4"
"""Version of the measurement; change it when results change."""


class KeptSensitivity:
    """The cache file of a model and a text."""

    def __init__(self, checkpoint: Checkpoint, samples: Samples) -> None:
        """Derive the file's name; reads a sample of the checkpoint."""
        known = (FORM, WINDOWS, LENGTH, checkpoint.fingerprint(), samples.fingerprint())
        digest = hashlib.sha256(" ".join(map(str, known)).encode()).hexdigest()
        folder = cache_folder() / "sensitivity"
        self.file = folder / f"{digest[:32]}.safetensors"

    def read(self) -> dict[str, Sensitivity] | None:
        """Return the cached sensitivities by tensor name; None if the file is missing or damaged."""
        with suppress(OSError, SafetensorError, KeyError, ValueError):
            tensors = load_file(self.file)
            means = {
                name.removesuffix(" mean"): float(mean) for name, mean in tensors.items() if name.endswith(" mean")
            }
            return {
                name: Sensitivity(
                    mean, tensors[f"{name} rows"], tensors[f"{name} columns"], tensors.get(f"{name} metric")
                )
                for name, mean in means.items()
            }
        return None

    def write(self, found: dict[str, Sensitivity]) -> None:
        """Write the file; does nothing if the cache directory is not writable."""
        tensors: dict[str, torch.Tensor] = {}
        for name, own in found.items():
            tensors[f"{name} mean"] = torch.tensor(own.mean, dtype=torch.float64)
            tensors |= {f"{name} rows": own.rows.contiguous(), f"{name} columns": own.columns.contiguous()}
            if own.metric is not None:
                tensors[f"{name} metric"] = own.metric.contiguous()
        with suppress(OSError, SafetensorError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            part = self.file.with_suffix(f".{os.getpid()}")
            save_file(tensors, part)
            files.replace(part, self.file)
            kept = sorted(self.file.parent.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
            for file in kept[:-MOST]:
                files.remove(file, missing_ok=True)

"""Sensitivities that were measured, kept in a file: a model and a text are measured once, for every size and dry run.

Files lie in the user's cache directory, named by a digest of the model's and the text's content. Any of them may go.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moepack.calibration.fisher import LENGTH, WINDOWS, Sensitivity
from moepack.calibration.samples import Samples
from moepack.checkpoint import Checkpoint

__all__ = ["KeptSensitivity"]

MOST = 16
"""Files that are kept; the oldest go."""

FORM = "2"
"""Changes when sensitivity is measured differently."""


class KeptSensitivity:
    """The file for a model and a text."""

    def __init__(self, checkpoint: Checkpoint, samples: Samples) -> None:
        """Name the file; reads a sample of the checkpoint."""
        known = (FORM, WINDOWS, LENGTH, checkpoint.fingerprint(), samples.fingerprint())
        digest = hashlib.sha256(" ".join(map(str, known)).encode()).hexdigest()
        home = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(home) if home else Path.home() / ".cache") / "moepack" / "sensitivity"
        self.file = folder / f"{digest[:32]}.safetensors"

    def read(self) -> dict[str, Sensitivity] | None:
        """What was kept; None if nothing was, or the file is damaged."""
        with suppress(OSError, SafetensorError, KeyError, ValueError):
            tensors = load_file(self.file)
            means = {
                name.removesuffix(" mean"): float(mean) for name, mean in tensors.items() if name.endswith(" mean")
            }
            return {
                name: Sensitivity(mean, tensors[f"{name} rows"], tensors[f"{name} columns"])
                for name, mean in means.items()
            }
        return None

    def write(self, found: dict[str, Sensitivity]) -> None:
        """Keep what was found, where the cache directory can be written to."""
        tensors: dict[str, torch.Tensor] = {}
        for name, own in found.items():
            tensors[f"{name} mean"] = torch.tensor(own.mean, dtype=torch.float64)
            tensors |= {f"{name} rows": own.rows.contiguous(), f"{name} columns": own.columns.contiguous()}
        with suppress(OSError, SafetensorError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            part = self.file.with_suffix(f".{os.getpid()}")
            save_file(tensors, part)
            part.replace(self.file)
            kept = sorted(self.file.parent.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
            for file in kept[:-MOST]:
                file.unlink(missing_ok=True)

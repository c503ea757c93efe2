"""Compresses a model to many sizes with many methods, and measures the results."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from moepack.checkpoint import describe
from moepack.checkpoint.quantized import open_checkpoint
from moepack.checkpoint.resolve import resolve_model
from moepack.comparison.fitting import Wanted, fitted
from moepack.errors import MoepackError, MoepackWarning
from moepack.evaluation import evaluate
from moepack.export import export
from moepack.format.hub import BALANCE, PREDICTORS
from moepack.format.weights import weight_files
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.methods import Method
from moepack.methods.auto.packer import Allocated
from moepack.pipeline import compress
from moepack.pipeline.estimate import estimate
from moepack.units import size as size_text

__all__ = ["Comparison", "Point"]


@dataclass(frozen=True)
class Point:
    """One packed model.

    Attributes:
        method: name of the method.
        wanted, size: requested and actual bytes of all weight files; `wanted` is None if no size was requested.
        rise: by text, the loss increase over the original in nats per token.
        expected_rise, expected_seconds, expected_memory: estimates of the plan; None if unknown. Of a range of
            increases, the geometric mean.
        seconds, memory: time of compressing, and private memory of the process in bytes.
        errors: by role, the error scale that `auto` used (`moepack.methods.auto.packer`), or None.
    """

    method: str
    wanted: int | None
    size: int
    rise: dict[str, float]
    expected_rise: float | None
    expected_seconds: float | None
    expected_memory: int
    seconds: float
    memory: int
    errors: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return asdict(self)


class Comparison:
    """One model, and its losses on some texts.

    Attributes:
        path: the checkpoint.
        size: bytes of its weight files.
        original: loss in nats per token by text.
    """

    def __init__(
        self, model: str | PathLike[str], texts: Sequence[Path], chars: int = 100_000, device: str = "cpu"
    ) -> None:
        """Measure the original on the first `chars` characters of each text.

        Raises:
            CheckpointError, UnsupportedModelError, LoadError: the model cannot be read.
        """
        self.path, self._texts, self._chars, self._device = resolve_model(model), texts, chars, device
        self.checkpoint = open_checkpoint(self.path)
        self.model = describe(self.checkpoint)
        self.size = weight_bytes(self.path)
        self._tokenizer = open_tokenizer(self.path)
        self.original = self._losses(open_model(self.path, torch.float32).to(device))

    def points(self, sizes: Collection[int], methods: Collection[str], text: dict[str, Any]) -> Iterator[Point]:
        """Yield every method at every size that it can meet; `text` has the calibration settings, if any.

        A `MoepackWarning` names the others. Raises as `compress`, for instance for an unusable text.
        """
        for size in sizes:
            for name in methods:
                try:
                    method = fitted(name, Wanted(self.checkpoint, self.model, size, text))
                    found = self.point(name, method, size)
                except ValueError as why:
                    if isinstance(why, MoepackError):
                        raise
                    warnings.warn(f"{name} cannot meet {size_text(size)}: {why}", MoepackWarning, stacklevel=2)
                    continue
                yield found

    def point(
        self, name: str, method: Method, wanted: int | None = None, then: Callable[[Path], Path] = lambda packed: packed
    ) -> Point:
        """Compress in a temporary directory and measure the result of `then`; raises as `compress`."""
        with tempfile.TemporaryDirectory() as directory:
            packed = Path(directory) / "packed"
            plan = estimate(self.path, packed, method)
            done = compress(self.path, packed, method=plan.plan or method)
            packed = then(packed)
            losses = self._losses(self._opened(packed, method))
            size = weight_bytes(packed)
        rise = {text: loss - self.original[text] for text, loss in losses.items()}
        loss, packer = (None, None) if plan.plan is None else (plan.plan.loss, plan.plan.packer)
        expected = None if loss is None else math.sqrt(math.prod(loss))
        errors = dict(packer.errors) if isinstance(packer, Allocated) else None
        return Point(
            name, wanted, size, rise, expected, plan.seconds, plan.memory, round(done.seconds, 2), done.peak_memory,
            errors,
        )  # fmt: skip

    def _opened(self, packed: Path, method: Method) -> Any:
        """Open the packed model.

        On a device other than the CPU, it is opened with decoded weights, which gives the same loss if products do not
        round activations.
        """
        if self._device == "cpu" or getattr(method, "activation_bits", 16) != 16:
            return open_model(packed, torch.float32)
        plain = packed.with_name("plain")
        export(packed, plain)
        return open_model(plain, torch.float32).to(self._device)

    def _losses(self, model: Any) -> dict[str, float]:
        with torch.inference_mode():
            return {
                text.stem: evaluate(model, text, self._chars, tokenizer=self._tokenizer).loss for text in self._texts
            }


def weight_bytes(directory: Path) -> int:
    """Return the bytes of all weight files, and of the predictors and factors of a packed directory."""
    names = [name for name in (*weight_files(directory), PREDICTORS, BALANCE) if (directory / name).is_file()]
    return sum((directory / name).stat().st_size for name in names)

"""The method `auto`: allocates bits to all weights of a model by the cost of their errors, within a given size.

Coded integers (`moepack.methods.rate`) have the lowest loss at every rate, so all experts and linear layers use them,
at one price per bit. The cost of an error of each tensor is measured on the calibration text (`rate.importance`). It
determines the step of each tensor and the bits of each layer. Within a layer, the text's Hessians allocate the bits.
The difference between a layer's actual size and its budget is passed on to later layers.

With `prefer="speed"`, a tensor may also use a fixed-width format, whose products are several times as fast. The choice
minimizes a combination of loss and time (`mixed`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from moepack.backends.speeds import kept_speeds, measure_speeds
from moepack.calibration import CalibrationRequest, Stage
from moepack.calibration.fisher import TWO_TEXTS, needed_bytes, too_little
from moepack.calibration.text import BUILT_IN
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.balanced import balanced
from moepack.checkpoint.dense import EMBEDDING, ROLES
from moepack.errors import CalibrationError
from moepack.memory import total_bytes
from moepack.methods.auto.coded import Coded
from moepack.methods.auto.loss import WITHIN
from moepack.methods.auto.mixed import Mixed
from moepack.methods.auto.packer import Packer
from moepack.methods.auto.target import Target
from moepack.methods.base import Expected, Method, PackedTensor, Shape, Solution, Weights
from moepack.methods.coverage import coverage_notes
from moepack.methods.files import kept_bytes
from moepack.methods.rate import Rate
from moepack.methods.rate.importance import find_importance
from moepack.methods.rate.layer import LayerSolver
from moepack.methods.rate.method import LEAST_BITS, MOST_BITS
from moepack.progress import Progress, Silent
from moepack.units import size as in_words

__all__ = ["Auto"]

PREFER = ("quality", "speed")

NO_TEXT = "none"
"""Value of `calibration` that disables it."""

UNREAD = "The built-in text was not used, so the importance of weights is estimated without a text: {}."
"""A note; takes the reason and a remedy."""


@dataclass
class Auto(Method):
    """Settings of the method.

    Attributes:
        size: maximum size of all weight files, in bytes or as text such as `9GB`.
        bits_per_weight: the size in bits per weight of the checkpoint.
        ratio: the size relative to the checkpoint. If none of the three is given, the size is 4 bits per weight, or
            half of the free memory if that is less.
        calibration: text file, JSON lines, directory or data set of the hub. The default, "built-in", is a text that
            comes with the package. It is used only if the model's largest layer fits into memory in float32 with its
            gradients. None or "none" disables calibration.
        prefer: "quality", or "speed", which also considers the time of products on this machine.
        codes: "dependent" for tensors with enough bits, or "plain" for all.
        samples: maximum number of calibration windows.
        sequence_length: tokens per window.
        group: experts solved together.
        minimum_tokens: the notes name experts with fewer tokens.
        device: device of the model and the solver if there is a text.
        seed: seed of the span corruption of encoder-decoder models.
    """

    size: str | int | None = None
    bits_per_weight: float | None = None
    ratio: float | None = None
    calibration: str | None = BUILT_IN
    prefer: str = "quality"
    codes: str = "dependent"
    samples: int = 128
    sequence_length: int = 512
    group: int = 16
    minimum_tokens: int = 64
    device: str = "cpu"
    seed: int = 0
    name: ClassVar[str] = "auto"
    _goal: _Goal | None = field(default=None, init=False, repr=False)
    _packer: Packer | None = field(default=None, init=False, repr=False)
    _measured: bool = field(default=False, init=False, repr=False)
    _by_default: bool = field(default=False, init=False, repr=False)
    _unread_notes: tuple[str, ...] = field(default=(), init=False, repr=False)
    _guessed_notes: tuple[str, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        self._target = Target(self.size, self.bits_per_weight, self.ratio)
        if self.prefer not in PREFER:
            raise ValueError(f"prefer must be {' or '.join(PREFER)}, not {self.prefer}")
        # With prefer="speed", formats are compared by rounding errors of the weights, which need no text.
        none = self.calibration == NO_TEXT or (self.calibration == BUILT_IN and self.prefer == "speed")
        self._read(None if none else self.calibration)
        self._by_default = self.calibration == BUILT_IN

    def _read(self, source: str | None) -> None:
        """Set the calibration set; None disables calibration."""
        names = ("codes", "samples", "sequence_length", "group", "minimum_tokens", "device", "seed")
        self.calibration = source
        self._coder = Rate(MOST_BITS, calibration=source, **{name: getattr(self, name) for name in names})

    @property
    def request(self) -> CalibrationRequest | None:
        """The calibration set if tensors are solved on their inputs, otherwise None."""
        return self._coder.request if self.prefer == "quality" else None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that determine the output, complete after `prepare`; a text also contributes its fingerprint."""
        found: dict[str, Any] = {"prefer": self.prefer, "codes": self.codes}
        if self._goal is not None:
            found["size"] = self._goal.nbytes
        if isinstance(self._packer, Mixed):
            found["choices"] = self._packer.identity
        elif self.calibration is not None:
            found |= {key: getattr(self, key) for key in ("samples", "sequence_length", "group", "seed")}
        return found

    @property
    def dense_roles(self) -> frozenset[str]:
        """All roles."""
        return frozenset((EMBEDDING, *ROLES))

    @property
    def looks_ahead(self) -> bool:
        """True: bytes are allocated over the whole model."""
        return True

    @property
    def needs_balance(self) -> bool:
        """True with `prefer="speed"`, which also uses formats whose columns share scales."""
        return self.prefer == "speed"

    @property
    def counts_on(self) -> bool:
        """True: the remaining bytes are allocated again."""
        return True

    @property
    def in_turn(self) -> bool:
        """True with a text: the experts of a layer share its bits."""
        return self.request is not None

    @property
    def plans(self) -> bool:
        """True: the size of each tensor depends on all tensors."""
        return True

    @property
    def budget(self) -> int | None:
        """The requested size in bytes; None before `aim`."""
        return None if self._goal is None else self._goal.nbytes

    @property
    def reason(self) -> str:
        """The origin of the size, in words; empty before `aim`."""
        return "" if self._goal is None else self._goal.reason

    @property
    def kernel(self) -> str:
        """Products of coded integers, which all tensors use with `prefer="quality"`."""
        return "coded"

    @property
    def token_seconds(self) -> float | None:
        """Time of all products of packed weights per token; None unless `prefer="speed"`."""
        return self._packer.seconds if isinstance(self._packer, Mixed) else None

    @property
    def expected_loss(self) -> tuple[float, float] | None:
        """Bounds from squared errors and their measured importance; None if it was not measured."""
        if self._packer is None or not self._measured:
            return None
        return self._packer.loss / WITHIN, self._packer.loss * WITHIN

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the packed size in bytes if every weight were an exception."""
        return self._coder.bound(shape, role)

    def aim(self, checkpoint: Checkpoint, model: MoeModel) -> None:
        """Convert the requested size into bytes.

        Raises:
            ValueError: the size is impossibly small, or the checkpoint is not larger.
        """
        if self._goal is not None and self._goal.path == checkpoint.path:
            return
        if self._by_default:
            self._read(BUILT_IN)
            unread = self._unread(checkpoint, model)
            if unread is not None:
                self._read(None)
            self._unread_notes = () if unread is None else (UNREAD.format(unread),)
        nbytes, reason = self._target.nbytes(checkpoint)
        shapes = {part.packed_name: part.shape for layer in model.layers for part in layer.projections}
        linears = (linear for dense in model.dense for linear in dense.only(self.dense_roles).linears)
        shapes |= {linear.source: (1, *linear.shape) for linear in linears}
        kept = kept_bytes(self._packed_form(checkpoint, model), model, shapes)
        goal = _Goal(checkpoint.path, nbytes, reason, nbytes - kept, shapes)
        if goal.bits < LEAST_BITS:
            smallest = nbytes - goal.room + math.ceil(LEAST_BITS * goal.weights / 8)
            raise ValueError(f"{in_words(nbytes)} were requested, but this model needs at least {in_words(smallest)}")
        self._goal, self._packer = goal, None

    def _packed_form(self, checkpoint: Checkpoint, model: MoeModel) -> Checkpoint:
        """Return the form of a checkpoint that will be packed. No tensor is read."""
        if not self.needs_balance:
            return checkpoint
        sources = {source for layer in model.layers for part in layer.projections for source in part.sources}
        sources |= {linear.source for dense in model.dense for linear in dense.only(self.dense_roles).linears}
        return balanced(checkpoint, model, sources) or checkpoint

    def _unread(self, checkpoint: Checkpoint, model: MoeModel) -> str | None:
        """Return why the built-in text is not used, and a remedy, as clauses; None if it is used.

        Raises:
            UnsupportedModelError: transformers cannot build the model.
        """
        if checkpoint.config.get("is_encoder_decoder"):
            return f"{TWO_TEXTS}; `--calibration FILE` uses a text to reduce the error of each tensor"
        place = torch.device(self.device)
        memory = total_bytes() if place.type == "cpu" else torch.cuda.get_device_properties(place).total_memory
        if reason := too_little(needed_bytes(checkpoint, model), memory, "are installed"):
            return reason
        request = self._coder.request
        assert request is not None, "there is a calibration set"
        try:
            request.load(checkpoint)
        except CalibrationError as error:
            return f"{error}; correct this and compress again"
        return None

    def prepare(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> None:
        """Allocate the bytes.

        Raises:
            CalibrationError: the calibration set is unusable.
            InvalidTensorError: a weight is NaN or infinite.
            ValueError: see `aim`.
        """
        self.aim(checkpoint, model)
        if self._packer is not None:
            return
        goal, importance = self._known, find_importance(checkpoint, model, self._coder.request, progress or Silent())
        self._measured, self._guessed_notes = importance.measured, importance.notes
        if self.prefer == "speed":
            coder, speeds = replace(self._coder, calibration=None), kept_speeds() or measure_speeds()
            self._packer = Mixed.chosen(coder, checkpoint, model, importance, goal.room, goal.shapes, speeds)
        else:
            self._packer = Coded.within(self._coder, checkpoint, model, importance, goal.room, goal.shapes)

    @property
    def _known(self) -> _Goal:
        assert self._goal is not None, "aim comes first"
        return self._goal

    @property
    def packer(self) -> Packer:
        """The packer of the tensors; valid after `prepare`."""
        assert self._packer is not None, "prepare comes first"
        return self._packer

    def expected(self, weights: Weights) -> Expected:
        """Return the expected size of a tensor."""
        return self.packer.expected(weights)

    def decided(self, name: str) -> Any:
        """Return the step, the bit budget or the format of a tensor."""
        return self.packer.decision(name)

    def layer_plan(self, experts: int) -> LayerSolver | None:
        """Return the solver of a layer with a text, whose stages share its bits; otherwise None."""
        return None if self.request is None else self.packer.layer_solver()

    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        """Solve a stage on its inputs, or round one tensor if its inputs are unknown."""
        return self.packer.solve(stage)

    def pack(self, weights: Weights, solution: Solution) -> PackedTensor:
        """Pack a tensor in its format."""
        return self.packer.pack(weights, solution)

    def book(self, name: str, nbytes: int) -> None:
        """Record the size of a tensor; later tensors share the remaining bytes."""
        self.packer.book(name, nbytes)

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Explain why the text was not used or the cost of errors not measured, and name affected experts.

        These are experts that saw few tokens, and experts that were quantized without error compensation.
        """
        found = coverage_notes(layers, self.minimum_tokens, priced=True, emptied=not self._measured)
        return (*self._unread_notes, *self._guessed_notes, *found)


@dataclass(frozen=True)
class _Goal:
    """The requested size for one checkpoint.

    Attributes:
        path: path of the checkpoint.
        nbytes: maximum size of all weight files in bytes.
        reason: the origin of the size, in words.
        room: bytes for the packed tensors.
        shapes: shapes of the packed tensors, by name.
    """

    path: Path
    nbytes: int
    reason: str
    room: int
    shapes: Mapping[str, Shape]

    @property
    def weights(self) -> int:
        """Number of packed weights."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def bits(self) -> float:
        """Bits per packed weight."""
        return 8 * self.room / max(self.weights, 1)

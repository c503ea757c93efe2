"""The method `auto`: every weight of the model in as many bits as its errors are worth, within a size.

Coded integers (`moepack.methods.rate`) lose least at every rate, so they hold all experts and linear layers, at one
price of a bit. What an error of each tensor counts is measured on the calibration text (`importance`), and with it the
step of each tensor and the bits of each layer follow; within a layer, the text's Hessians share them out. What a layer
took more or less than it was given is taken from, or given to, those behind it.

With `prefer="speed"` each tensor is stored so, or in a format of fixed width, whose products are several times as fast:
what loss and time together are least with (`mixed`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from moepack.calibration import CalibrationRequest, Stage
from moepack.calibration.fisher import TWO_TEXTS, needed_bytes, too_little
from moepack.calibration.text import BUILT_IN
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import EMBEDDING, ROLES
from moepack.errors import CalibrationError
from moepack.memory import total_bytes
from moepack.methods.auto.coded import Coded
from moepack.methods.auto.loss import WITHIN
from moepack.methods.auto.mixed import Mixed
from moepack.methods.auto.packer import Packer
from moepack.methods.auto.target import Target
from moepack.methods.base import Expected, Method, PackedTensor, Shape, Solution, Weights
from moepack.methods.files import kept_bytes
from moepack.methods.rate import Rate
from moepack.methods.rate.importance import find_importance
from moepack.methods.rate.layer import LayerSolver
from moepack.methods.rate.method import LEAST_BITS, MOST_BITS
from moepack.progress import Progress, Silent
from moepack.runtime.speeds import kept_speeds, measure_speeds
from moepack.units import size as in_words

__all__ = ["Auto"]

PREFER = ("quality", "speed")

NO_TEXT = "none"
"""The calibration set that is none."""

UNREAD = "The built-in text was not read, so what errors of weights cost is a guess: {}."
"""A note; the reason and what helps follow."""


@dataclass
class Auto(Method):
    """Settings of the method.

    Attributes:
        size: bytes that all files of weights may take, or text such as `9GB`.
        bits_per_weight: the same over all weights of the checkpoint. ratio: the same over the checkpoint's bytes. With
            none of the three, half of the free memory or 4 bits a weight, whichever is smaller.
        calibration: text file, JSON lines, directory or data set of the hub. The default, "built-in", is a text that
            comes with the package, where the model's largest layer fits into memory in float32 with its gradients;
            None or "none" does without.
        prefer: "quality", or "speed", which weighs the time of products on this machine, too.
        codes: "dependent" where tensors have the bits for it, or "plain" for all.
        samples: calibration windows, at most.
        sequence_length: tokens a window.
        group: experts solved together.
        minimum_tokens: experts with fewer are named in the notes.
        device: where the model and the solver run with a text.
        seed: of the span corruption of encoder-decoder models.
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
        # Where speed is preferred, formats are compared by errors of weights as they are, and no text is needed.
        none = self.calibration == NO_TEXT or (self.calibration == BUILT_IN and self.prefer == "speed")
        self._read(None if none else self.calibration)
        self._by_default = self.calibration == BUILT_IN

    def _read(self, source: str | None) -> None:
        """Take a calibration set, or none."""
        names = ("codes", "samples", "sequence_length", "group", "minimum_tokens", "device", "seed")
        self.calibration = source
        self._coder = Rate(MOST_BITS, calibration=source, **{name: getattr(self, name) for name in names})

    @property
    def request(self) -> CalibrationRequest | None:
        """The calibration set, where tensors are solved on what they read."""
        return self._coder.request if self.prefer == "quality" else None

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the bytes follow from, once `prepare` knows it; of the text in addition its fingerprint."""
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
        """All of them."""
        return frozenset((EMBEDDING, *ROLES))

    @property
    def looks_ahead(self) -> bool:
        """The bytes of the whole model are shared out."""
        return True

    @property
    def counts_on(self) -> bool:
        """What is left of the bytes is shared out again."""
        return True

    @property
    def in_turn(self) -> bool:
        """With a text, a layer's bits are shared by its experts."""
        return self.request is not None

    @property
    def plans(self) -> bool:
        """What each tensor takes follows from all of them."""
        return True

    @property
    def budget(self) -> int | None:
        """The size."""
        return None if self._goal is None else self._goal.nbytes

    @property
    def reason(self) -> str:
        """How the size came about, in words."""
        return "" if self._goal is None else self._goal.reason

    @property
    def kernel(self) -> str:
        """Products of coded integers, where tensors are nothing else."""
        return "coded"

    @property
    def token_seconds(self) -> float | None:
        """What products of packed weights take for a token, where that was weighed."""
        return self._packer.seconds if isinstance(self._packer, Mixed) else None

    @property
    def expected_loss(self) -> tuple[float, float] | None:
        """From squared errors, and what they count; None where that was not measured."""
        if self._packer is None or not self._measured:
            return None
        return self._packer.loss / WITHIN, self._packer.loss * WITHIN

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the size if every weight were an exception."""
        return self._coder.bound(shape, role)

    def aim(self, checkpoint: Checkpoint, model: MoeModel) -> None:
        """Turn what was asked for into bytes; raises ValueError for less than is possible and more than there is."""
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
        goal = _Goal(checkpoint.path, nbytes, reason, nbytes - kept_bytes(checkpoint, model, shapes), shapes)
        if goal.bits < LEAST_BITS:
            smallest = nbytes - goal.room + math.ceil(LEAST_BITS * goal.weights / 8)
            raise ValueError(
                f"{in_words(nbytes)} were asked for; the least that can be made of this model is {in_words(smallest)}"
            )
        self._goal, self._packer = goal, None

    def _unread(self, checkpoint: Checkpoint, model: MoeModel) -> str | None:
        """Why the built-in text is not read, and what helps, as clauses; None where it is.

        Raises:
            UnsupportedModelError: transformers cannot build the model.
        """
        if checkpoint.config.get("is_encoder_decoder"):
            return f"{TWO_TEXTS}; `--calibration FILE` solves tensors on what they read of a text"
        place = torch.device(self.device)
        memory = total_bytes() if place.type == "cpu" else torch.cuda.get_device_properties(place).total_memory
        if reason := too_little(needed_bytes(checkpoint, model), memory, "is what this machine has"):
            return reason
        request = self._coder.request
        assert request is not None, "there is a calibration set"
        try:
            request.load(checkpoint)
        except CalibrationError as error:
            return f"{error}; mend that and compress again"
        return None

    def prepare(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> None:
        """Share out the bytes.

        Raises:
            CalibrationError: the calibration set is unusable.
            InvalidTensorError: a weight is NaN or infinite.
            ValueError: as for `aim`.
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
        """What packs the tensors, after `prepare`."""
        assert self._packer is not None, "prepare comes first"
        return self._packer

    def expected(self, weights: Weights) -> Expected:
        """Return what a tensor was given."""
        return self.packer.expected(weights)

    def decided(self, name: str) -> Any:
        """What a tensor was given, or how it is stored."""
        return self.packer.decision(name)

    def layer_plan(self, experts: int) -> LayerSolver | None:
        """With a text, the stages of a layer share its bits."""
        return None if self.request is None else self.packer.layer_solver()

    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        """Solve a stage on what it reads, or round one tensor where nothing is known of that."""
        return self.packer.solve(stage)

    def pack(self, weights: Weights, solution: Solution) -> PackedTensor:
        """Pack a tensor in its format."""
        return self.packer.pack(weights, solution)

    def book(self, name: str, nbytes: int) -> None:
        """What a tensor took is known: those behind it share what is left."""
        self.packer.book(name, nbytes)

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Say why a text was not read, or told nothing of what errors cost; name experts that saw few tokens, and
        experts that were quantized without error compensation."""
        return (*self._unread_notes, *self._guessed_notes, *self._coder.notes(layers))


@dataclass(frozen=True)
class _Goal:
    """What was asked for, of one checkpoint.

    Attributes:
        path: the checkpoint.
        nbytes: of all files of weights.
        reason: how they came about, in words.
        room: bytes for what is packed.
        shapes: of what is packed, by name.
    """

    path: Path
    nbytes: int
    reason: str
    room: int
    shapes: Mapping[str, Shape]

    @property
    def weights(self) -> int:
        """How many weights are packed."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def bits(self) -> float:
        """Bits for each of them."""
        return 8 * self.room / max(self.weights, 1)

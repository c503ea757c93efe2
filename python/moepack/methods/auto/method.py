"""The method `auto`: allocates bits to all weights of a model by the cost of their errors, within a given size.

Coded integers (`moepack.methods.rate`) have the lowest loss at every rate, so all experts and linear layers use them,
at one price per bit. The cost of an error of each tensor is measured on the calibration text (`rate.importance`). It
determines the step of each tensor and the bits of each layer. Within a layer, the text's Hessians allocate the bits.
The difference between a layer's actual size and its budget is passed on to later layers.

The default, `prefer="balance"`, and `prefer="speed"` also limit the time of a token on a target machine. A tensor may
then use a fixed-width format, whose products are faster on most processors and which is solved on the text as well
(`mixed`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from moepack.backends.speeds import Speeds
from moepack.backends.targets import speeds_of
from moepack.calibration import CalibrationRequest
from moepack.calibration.fisher import TWO_TEXTS, needed_bytes, too_little
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.balanced import balanced
from moepack.checkpoint.dense import EMBEDDING, ROLES
from moepack.errors import DeviceError, UnsupportedModelError
from moepack.methods.auto.coded import Coded
from moepack.methods.auto.loss import WITHIN
from moepack.methods.auto.mixed import CODED, Alternatives, Mixed
from moepack.methods.auto.packer import Allocated
from moepack.methods.auto.settings import AutoSettings
from moepack.methods.auto.target import Target
from moepack.methods.base import Method, MethodPlan, Shape
from moepack.methods.files import kept_bytes
from moepack.methods.fitting import Fitted, Wanted
from moepack.methods.mixins import Goal, MeetsSize, PacksLinears
from moepack.methods.pinned import Pin, PinsBits
from moepack.methods.preference import Preference, slow_coded
from moepack.methods.rate.coder import bound
from moepack.methods.rate.importance import Importance, find_importance
from moepack.methods.rate.method import Rate
from moepack.methods.rate.pinned import PinnedTensor, completed, pinned_bytes, rest_of, whole
from moepack.methods.rate.settings import LEAST_BITS, MOST_BITS
from moepack.methods.request import TEXT_SETTINGS, DefaultText, installed_bytes, readable
from moepack.progress import Progress, Silent
from moepack.units import size as in_words

__all__ = ["Auto"]


@dataclass
class Auto(AutoSettings, Fitted, PinsBits, DefaultText, MeetsSize, PacksLinears, Method):
    """The method with its settings."""

    pinned_bits: ClassVar[str] = f"{LEAST_BITS:g} to {MOST_BITS:g}"
    pinned_roles: ClassVar[frozenset[str]] = frozenset((EMBEDDING, *ROLES))
    splits_experts: ClassVar[bool] = True
    without_text: ClassVar[str] = "the importance of weights is estimated"

    sized_by_plan: ClassVar[bool] = True
    depends_on_sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._target = Target(self.size, self.bits_per_weight, self.ratio)
        self._rate(self.calibration)  # runs its checks

    def _rate(self, source: str | None) -> Rate:
        """Return the method that codes tensors, with a text or without one."""
        names = ("codes", "samples", "sequence_length", "group", "minimum_tokens", "device", "seed")
        return Rate(MOST_BITS, calibration=source, **{name: getattr(self, name) for name in names})

    @property
    def request(self) -> CalibrationRequest | None:
        """The calibration set if tensors are solved on their inputs, otherwise None."""
        return self._rate(self.calibration).request

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that determine the output together with the size; a text also contributes its fingerprint."""
        return self._settings(self.calibration)

    def _settings(self, source: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {"prefer": self.prefer, "codes": self.codes}
        if source is not None:
            found |= {key: getattr(self, key) for key in TEXT_SETTINGS}
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
        """Whether formats whose columns share scales may be used."""
        return self.prefer == "speed" or (self.prefer == "balance" and slow_coded(self.speeds))

    @cached_property
    def speeds(self) -> Speeds:
        """The speeds of the target: of its GPU with `device="cuda"` if packed weights run there.

        Raises:
            ValueError: see `speeds_of`.
        """
        if self.device != "cpu":
            try:
                return speeds_of(self.target, self.device)
            except DeviceError:
                pass  # calibration runs on GPUs that packed weights do not run on
        return speeds_of(self.target)

    @property
    def kernel(self) -> str:
        """Products of coded integers, or of integers in groups with `prefer="speed"`."""
        return "int" if self.prefer == "speed" else "coded"

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the packed size in bytes if every weight were an exception."""
        return bound(shape)

    def goal(self, checkpoint: Checkpoint, model: MoeModel) -> Goal:
        """Convert the requested size into bytes.

        Raises:
            ValueError: the size is impossibly small, or the checkpoint is not larger.
        """
        nbytes, reason = self._target.nbytes(checkpoint)
        room, shapes = self._room(nbytes, checkpoint, model)
        weights = sum(map(math.prod, shapes.values()))
        if not weights and self._target.usual:
            return Goal(nbytes - room, "the size that the bits by name give")
        if 8 * room / max(weights, 1) < LEAST_BITS:
            smallest = nbytes - room + math.ceil(LEAST_BITS * weights / 8)
            pins = " with these bits by name" if self.overrides else ""
            raise ValueError(
                f"{in_words(nbytes)} were requested, but this model needs at least {in_words(smallest)}{pins}"
            )
        return Goal(nbytes, reason)

    def _room(self, nbytes: int, checkpoint: Checkpoint, model: MoeModel) -> tuple[int, dict[str, Shape]]:
        """Return the bytes out of `nbytes` for packed tensors whose bits are not given, and their shapes by name."""
        shapes = self._shapes(model)
        pins = pinned_bytes(self)
        kept = kept_bytes(self._packed_form(checkpoint, model), model, shapes.keys() | pins.keys())
        rest = {name: shape for name, shape in shapes.items() if name not in pins}
        return nbytes - kept - math.ceil(sum(pins.values())), rest

    def _shapes(self, model: MoeModel) -> dict[str, Shape]:
        """Return the shapes of all packed tensors, by name."""
        shapes = {part.packed_name: part.shape for layer in model.layers for part in layer.projections}
        linears = (linear for dense in model.dense for linear in dense.only(self.dense_roles).linears)
        return shapes | {linear.source: (1, *linear.shape) for linear in linears}

    def pin(self, pins: Sequence[Pin], checkpoint: Checkpoint, model: MoeModel) -> dict[str, Method]:
        """Return a method for each tensor; the others share the rest of the size."""
        rest = 0.0
        if any(None in pin.bits for pin in pins):
            room, shapes = self._room(self._target.nbytes(checkpoint)[0], checkpoint, model)
            rest = rest_of([*pins], 8 * room, sum(map(math.prod, shapes.values())))
        return {pin.name: PinnedTensor(pin, self) for pin in completed([*pins], rest, self.name, self.pinned_bits)}

    def coding(
        self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None
    ) -> tuple[Rate, CalibrationRequest | None, Importance]:
        """See `moepack.methods.rate.pinned.Coding`."""
        rate = self._rate(self.calibration)
        found = find_importance(checkpoint, whole(self, checkpoint, model), rate.request, progress or Silent())
        return rate, rate.request, found

    def plan(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> MethodPlan:
        """Allocate the bytes; without the built-in text if the model cannot run on it.

        Raises:
            CalibrationError: the calibration set is unusable.
            InvalidTensorError: a weight is NaN or infinite.
            ValueError: see `goal`.
        """
        if (other := readable(self, checkpoint, model)) is not self:
            return other.plan(checkpoint, model, progress)
        goal = self.goal(checkpoint, model)
        room, shapes = self._room(goal.nbytes, checkpoint, model)
        rate, _, importance = self.coding(checkpoint, model, progress)
        settings = {**self._settings(rate.calibration), "size": goal.nbytes}
        packer, seconds, preferences = self._preferred(rate, checkpoint, model, importance, room, shapes)
        if isinstance(packer, Mixed):
            settings["choices"] = packer.identity
        if self.prefer != "quality":
            settings["speeds"] = self.speeds.to_json()
        return MethodPlan(
            self,
            packer,
            checkpoint.fingerprint(),
            settings,
            request=rate.request,
            decisions=packer.decisions,
            goal=goal,
            loss=(packer.loss / WITHIN, packer.loss * WITHIN) if importance.measured else None,
            token_seconds=seconds,
            preferences=preferences,
            machine=self.speeds.machine,
            notes=importance.notes,
        )

    def _preferred(
        self,
        rate: Rate,
        checkpoint: Checkpoint,
        model: MoeModel,
        importance: Importance,
        room: int,
        shapes: Mapping[str, Shape],
    ) -> tuple[Allocated, float | None, tuple[Preference, ...]]:
        """Return the packer of the preferred formats, its seconds per token, and all preferences.

        The last two are None and empty if names give the bits of all tensors.
        """
        pins = pinned_bytes(self)
        if not shapes:
            return Coded.within(rate, checkpoint, model, importance, room, shapes, pins), None, ()
        found = Alternatives.of(rate, checkpoint, model, importance, room, shapes, self.speeds, pins)
        chosen = found.chosen()
        taken, seconds = found.taken(chosen[self.prefer]), found.seconds(chosen[self.prefer])
        preferences = found.preferences(chosen, importance.measured)
        if all(one.format == CODED for one in taken.values()):
            return Coded.within(rate, checkpoint, model, importance, room, shapes, pins), seconds, preferences
        return Mixed.of(rate, checkpoint, model, importance, room, shapes, taken, pins), seconds, preferences

    def _packed_form(self, checkpoint: Checkpoint, model: MoeModel) -> Checkpoint:
        """Return the form of a checkpoint that will be packed. No tensor is read."""
        if not self.needs_balance:
            return checkpoint
        sources = {source for layer in model.layers for part in layer.projections for source in part.sources}
        sources |= {linear.source for dense in model.dense for linear in dense.only(self.dense_roles).linears}
        return balanced(checkpoint, model, sources) or checkpoint

    def hindrance(self, checkpoint: Checkpoint, model: MoeModel) -> str | None:
        """See `DefaultText`; the model must also have one text, and memory for the gradients of its largest layer."""
        if checkpoint.config.get("is_encoder_decoder"):
            return f"{TWO_TEXTS}; `--calibration FILE` uses a text to reduce the error of each tensor"
        try:
            needed = needed_bytes(checkpoint, model)
        except UnsupportedModelError as error:
            return str(error)
        reason = too_little(needed, installed_bytes(self.device), "are installed")
        return reason or super().hindrance(checkpoint, model)

    @classmethod
    def fitted(cls, wanted: Wanted) -> Auto:
        """Meet a size; see `Fitted`."""
        return cls(wanted.size, **wanted.text)

    @classmethod
    def fittings(cls) -> Mapping[str, Callable[[Wanted], Auto]]:
        """Also without a text, and the other preferences; see `Fitted`."""
        return {
            "auto": cls.fitted,
            "auto without a text": lambda wanted: cls(wanted.size, calibration=None),
            "auto for quality": lambda wanted: cls(wanted.size, prefer="quality", **wanted.text),
            "auto for speed": lambda wanted: cls(wanted.size, prefer="speed", **wanted.text),
        }

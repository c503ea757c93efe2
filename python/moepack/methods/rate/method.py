"""The method `rate`: integers of one step for the whole model, rounded with their code's length in mind, at any rate.

Nothing is calibrated: an error counts by what the checkpoint knows, the share of tokens that visit an expert. The step
follows from the bits that were asked for and a sample of the model (`step`), weights are rounded to it
(`moepack.solvers.priced`), and an entropy coder stores the integers in as many bytes as they carry information.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from moepack import _core
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import ROLES
from moepack.errors import InvalidTensorError
from moepack.methods.base import Expected, Method, PackedTensor, Shape, Solution, Stage, Weights
from moepack.methods.rate.sample import take_sample
from moepack.methods.rate.step import Step, find_step
from moepack.solvers.priced import round_priced

__all__ = ["Rate"]

LEAST_BITS, MOST_BITS = 0.4, 8.0


@dataclass
class Rate(Method):
    """Settings of the method.

    Attributes:
        bits_per_weight: of everything that is packed, all metadata counted; 0.4 to 8.
        roles: linear layers outside the experts that are packed at the same price: "all", "none", or some with commas
            (attention, shared, mlp, head).
    """

    bits_per_weight: float
    roles: str = "all"
    name: ClassVar[str] = "rate"
    _step: Step | None = field(default=None, init=False, repr=False)
    _widths: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not LEAST_BITS <= self.bits_per_weight <= MOST_BITS:
            raise ValueError(f"bits_per_weight must be {LEAST_BITS} to {MOST_BITS:g}, not {self.bits_per_weight}")
        given = {"all": ROLES, "none": ()}.get(self.roles, tuple(self.roles.split(",")))
        if unknown := sorted(set(given) - set(ROLES)):
            raise ValueError(f"roles must be all, none, or some of {', '.join(ROLES)}, not {', '.join(unknown)}")
        self._roles = frozenset(given)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Every setting that changes the bytes."""
        return {
            "bits_per_weight": self.bits_per_weight,
            "roles": ",".join(role for role in ROLES if role in self._roles),
        }

    @property
    def dense_roles(self) -> frozenset[str]:
        """The roles that are packed."""
        return self._roles

    @property
    def looks_ahead(self) -> bool:
        """One step serves the whole model."""
        return True

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the size if every weight were an exception."""
        experts, rows, columns = shape
        return experts * rows * (10 * columns + 256) + 8192

    def expected(self, weights: Weights) -> Expected:
        """Return the bits that were asked for: tensors of narrow weights will take fewer, others more."""
        return Expected(math.prod(weights.shape) * self.bits_per_weight / 8, exact=False)

    def prepare(self, checkpoint: Checkpoint, model: MoeModel) -> None:
        """Find the step.

        Raises:
            InvalidTensorError: a weight of the sample is NaN or infinite.
            ValueError: metadata alone takes more bits.
        """
        sample = take_sample(checkpoint, model, self._roles)
        self._step = find_step(sample, self.bits_per_weight)
        self._widths = dict(sample.widths)

    def decided(self, name: str) -> float:
        """The step of a tensor."""
        return self._step_of(name)

    def _step_of(self, name: str) -> float:
        assert self._step is not None, "prepare comes first"
        # A bfloat16, as the format stores it in two bytes.
        return float(torch.tensor(self._step.size * self._widths[name]).bfloat16())

    def solve(self, stage: Stage) -> dict[str, Solution]:
        """Round one tensor, expert by expert; holds its integers, a byte a weight where 127 is the largest."""
        assert self._step is not None, "prepare comes first"
        ((name, weights),) = stage.tensors.items()
        experts, rows, columns = weights.shape
        step, width = self._step_of(weights.name), self._widths[weights.name]
        whole = torch.empty(weights.shape, dtype=torch.int8)
        for expert in range(experts):
            try:
                found = round_priced(weights.expert(expert), step, self._step.lengths, width=width)
            except ValueError as cause:
                raise InvalidTensorError(str(cause), tensor=weights.sources[expert]) from cause
            if found.dtype.itemsize > whole.dtype.itemsize:
                whole = whole.to(found.dtype)
            whole[expert] = found
            stage.advance(rows * columns)
        return {name: Solution({"symbols": whole, "step": torch.tensor([[step]])})}

    def pack(self, weights: Weights, solution: Solution) -> PackedTensor:
        """Code the integers."""
        symbols, step = solution.parts["symbols"].numpy(), solution.parts["step"].numpy()
        try:
            blob = _core.encode_coded(symbols, step, ndim=weights.ndim)
        except ValueError as cause:
            raise InvalidTensorError(str(cause), tensor=weights.name) from cause
        return PackedTensor("coded", blob, _core.PackedTensor(blob).details())

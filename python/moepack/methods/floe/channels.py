"""Joins gate and down projection: each record holds a channel's gate row and down column side by side."""

from dataclasses import dataclass
from functools import cached_property

import torch

from moepack.backends import is_silu
from moepack.checkpoint import Checkpoint, MoeLayer, MoeModel, Projection
from moepack.checkpoint.classes import building, meta_model
from moepack.checkpoint.experts import form_of
from moepack.errors import UnsupportedModelError
from moepack.format.manifest import RESIDUALS

__all__ = ["CHANNELS", "DOWN", "GATE", "RESIDUALS", "UP", "Channels", "by_channels", "refuse_other_experts"]

GATE, UP, DOWN, CHANNELS = "gate_proj", "up_proj", "down_proj", "channels"
"""Names of the projections of an arranged layer."""


@dataclass(frozen=True)
class Channels(Projection):
    """Records [E, I, 2 H] of two projections; `parts` are those of the gate, then those of the down projection.

    Attributes:
        gate: gate projection, [E, I, H].
        down: down projection, [E, H, I].
        twice: whether the projections are also packed separately.
    """

    gate: Projection
    down: Projection
    twice: bool = False

    def expert(self, index: int, device: torch.device | None = None) -> torch.Tensor:
        """Return the records of one expert, [I, 2 H]."""
        return torch.cat([self.gate.expert(index, device), self.down.expert(index, device).T], dim=1)

    @cached_property
    def nbytes(self) -> int:
        """Size of both projections in the checkpoint in bytes; 0 if they are also packed, and counted, separately."""
        return 0 if self.twice else self.gate.nbytes + self.down.nbytes


def by_channels(layer: MoeLayer, coarse: bool = False) -> MoeLayer:
    """Return a layer with an up projection and records instead of its three projections.

    The records have the name of the original down projection and another shape, so a reader that does not know them
    fails. With `coarse`, all three projections stay, and the records are residuals with a separate name.

    Raises:
        UnsupportedModelError: the experts have no gate.
    """
    found = {projection.name: projection for projection in layer.projections}
    if set(found) != {GATE, UP, DOWN}:
        raise UnsupportedModelError(f"'{layer.name}' has no experts with a gate, which floe needs")
    gate, up, down = found[GATE], found[UP], found[DOWN]
    experts, rows, columns = gate.shape
    shape, parts = (experts, rows, 2 * columns), (*gate.parts, *down.parts)
    kind = RESIDUALS if coarse else CHANNELS
    name = f"{down.packed_name.removesuffix(down.name)}{kind}" if coarse else down.packed_name
    records = Channels(kind, shape, name, parts, gate.checkpoint, gate, down, coarse)
    first = (gate, up, down) if coarse else (up,)
    return MoeLayer(layer.name, (*first, records), layer.router, layer.shared)


def refuse_other_experts(checkpoint: Checkpoint, model: MoeModel) -> None:
    """Reject experts that do not compute down(SiLU(gate x) * up x), because no packed module can replace them.

    Raises:
        UnsupportedModelError: the model has such experts; names the module.
    """
    with building(checkpoint.path):
        whole = meta_model(checkpoint.path, checkpoint.config)
    for layer in model.layers:
        module = whole.get_submodule(layer.name)
        form, activation = form_of(module), getattr(module, "act_fn", None)
        if form is None or form.kind != "gated" or activation is None or not is_silu(activation):
            name = type(module).__name__
            message = f"'{layer.name}' ({name}) does not compute down(SiLU(gate x) * up x), which floe needs"
            raise UnsupportedModelError(message, file=checkpoint.path)

"""Gate and down projection as one: of each channel the gate's row and the down projection's column, side by side."""

from dataclasses import dataclass
from functools import cached_property

import torch

from moepack.checkpoint import Checkpoint, MoeLayer, MoeModel, Projection
from moepack.checkpoint.classes import building, meta_model
from moepack.checkpoint.experts import form_of
from moepack.errors import UnsupportedModelError
from moepack.format.manifest import RESIDUALS
from moepack.runtime.backends import is_silu

__all__ = ["CHANNELS", "DOWN", "GATE", "RESIDUALS", "UP", "Channels", "by_channels", "refuse_other_experts"]

GATE, UP, DOWN, CHANNELS = "gate_proj", "up_proj", "down_proj", "channels"
"""The projections of an arranged layer."""


@dataclass(frozen=True)
class Channels(Projection):
    """Records [E, I, 2 H] of two projections; `parts` are the gate's, then the down projection's.

    Attributes:
        gate: [E, I, H].
        down: [E, H, I].
        twice: whether the projections are packed by themselves, too.
    """

    gate: Projection
    down: Projection
    twice: bool = False

    def expert(self, index: int) -> torch.Tensor:
        """The records of one expert, [I, 2 H]."""
        return torch.cat([self.gate.expert(index), self.down.expert(index).T], dim=1)

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes of both projections as the checkpoint stores them; none of what is counted elsewhere."""
        return 0 if self.twice else self.gate.nbytes + self.down.nbytes


def by_channels(layer: MoeLayer, coarse: bool = False) -> MoeLayer:
    """Return a layer with the up projection and records in place of its three projections, or beside coarse ones.

    The records have the name of the stock down projection, in another shape: a reader that does not know them fails.
    Beside coarse projections they are residuals, under a name of their own.

    Raises:
        UnsupportedModelError: its experts have no gate.
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
    """Refuse experts that compute anything but down(SiLU(gate x) * up x): no packed module would stand for them.

    Raises:
        UnsupportedModelError: names the module.
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

"""Collects the normalized states that attention and feed-forward layers read, for learning a rotation.

With a norm's weights folded into the following layers, these layers read h / rms(h), to which the rotation is applied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moepack.calibration import CalibrationSettings, Calibrator, Samples
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.architectures import described
from moepack.errors import CalibrationError

__all__ = ["normalized_states"]


def normalized_states(
    checkpoint: Checkpoint, model: MoeModel, samples: Samples, count: int, device: torch.device, seed: int = 0
) -> Tensor:
    """Return at most `count` states [n, H] float32 on the CPU, from all norms and samples.

    Raises:
        CalibrationError: the model computes NaN, or has no such norm.
    """
    generator = torch.Generator().manual_seed(seed)
    settings = CalibrationSettings(activations="original", device=device)
    calibrator = Calibrator(checkpoint, model, samples, settings)
    found: list[Tensor] = []
    names = described(model.architecture).norms
    norms = [module for name, module in calibrator.skeleton.module.named_modules() if name.rsplit(".", 1)[-1] in names]
    if not norms:
        raise CalibrationError("the model has none of the norms from which a rotation is learned")
    batches = len(norms) * -(-len(samples.inputs) // settings.batch)
    share = -(-count // max(batches, 1))

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        h = given[0].detach().float().flatten(0, -2)
        h = h[torch.randint(len(h), (min(share, len(h)),), generator=generator).to(h.device)]
        epsilon = float(getattr(module, "variance_epsilon", 1e-6))
        found.append((h * torch.rsqrt(h.square().mean(-1, keepdim=True) + epsilon)).cpu())

    hooks = [module.register_forward_pre_hook(note) for module in norms]
    try:
        for run in calibrator.layers():
            run.keep()
    finally:
        for hook in hooks:
            hook.remove()
    states = torch.cat(found)
    return states[torch.randperm(len(states), generator=generator)[:count]]

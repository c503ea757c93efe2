"""The experts of architectures without a description, found in transformers' model, where that is safe.

Transformers 5 keeps the experts of most architectures in one standard module (`use_experts_implementation`): gate and
up joined as `[E, 2I, H]`, down as `[E, H, I]`, `down(act(gate x) * up x)`, no bias. For such a model moepack needs no
knowledge of its own. So the model is built from config.json without weights (on the meta device), and accepted if every
experts module in it is of the standard layout, and there is one at least. The checkpoint must then have exactly these
experts under common names (`architectures.standard`).

Anything else is refused: a guess that is wrong would quantize the wrong tensors without a sign.
"""

from typing import Any

import torch

from moepack.checkpoint.architectures import ARCHITECTURES
from moepack.checkpoint.reader import Checkpoint
from moepack.errors import UnsupportedModelError

__all__ = ["expert_modules", "refusal"]

_FLAGS = {
    "has_gate": True,
    "is_concatenated": True,
    "is_transposed": False,
    "has_bias": False,
    "has_post_expert_norm": False,
}
"""What `use_experts_implementation` notes on a module of the standard layout; older versions know fewer flags."""


def refusal(checkpoint: Checkpoint, reason: str) -> UnsupportedModelError:
    """The error for a model that cannot be read; it lists the architectures that can."""
    return UnsupportedModelError(
        f"model type '{checkpoint.config['model_type']}' is not supported: {reason}. Supported are "
        f"{', '.join(sorted(ARCHITECTURES))}, and models whose experts transformers keeps in its standard layout",
        file=checkpoint.path,
    )


def expert_modules(checkpoint: Checkpoint) -> dict[str, tuple[int, int, int]]:
    """Paths of the experts modules of the model, and the shape of their gate projection.

    Raises:
        UnsupportedModelError: the model cannot be built, or not all of its experts are of the standard layout.
    """
    found: dict[str, tuple[int, int, int]] = {}
    for name, module in _meta_model(checkpoint).named_modules():
        if not hasattr(module, "is_transposed") and not name.endswith(".experts"):
            continue
        shape = _standard_shape(module)
        if shape is None:
            raise refusal(checkpoint, f"{name} is not of transformers' standard layout")
        found[name] = shape
    if not found:
        raise refusal(checkpoint, "the model has no experts")
    return found


def _standard_shape(module: torch.nn.Module) -> tuple[int, int, int] | None:
    """Experts, inner and hidden width of a module of the standard layout; None for any other."""
    from transformers.integrations import moe

    parameters = dict(module.named_parameters())
    if set(parameters) != {"gate_up_proj", "down_proj"} or list(module.buffers()):
        return None
    if any(getattr(module, flag, value) != value for flag, value in _FLAGS.items()):
        return None
    if getattr(type(module), "_apply_gate", None) is not moe._default_apply_gate:
        return None
    gate_up, down = tuple(parameters["gate_up_proj"].shape), tuple(parameters["down_proj"].shape)
    if len(gate_up) != 3 or len(down) != 3 or gate_up != (down[0], 2 * down[2], down[1]):
        return None
    return down[0], down[2], down[1]


def _meta_model(checkpoint: Checkpoint) -> torch.nn.Module:
    """The model of config.json, with shapes and no weights; the checkpoint's own code is never run."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    model_type = checkpoint.config["model_type"]
    layers = checkpoint.config.get("num_hidden_layers", 0)
    if model_type not in CONFIG_MAPPING:
        raise refusal(checkpoint, "the installed transformers does not know it")
    if not isinstance(layers, int) or layers > len(checkpoint):
        raise refusal(checkpoint, f"{layers} layers are configured for {len(checkpoint)} tensors")
    try:
        config: Any = CONFIG_MAPPING[model_type].from_dict(dict(checkpoint.config))
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        with torch.device("meta"):
            model: torch.nn.Module = auto.from_config(config, trust_remote_code=False)
    except Exception as cause:
        raise refusal(checkpoint, f"transformers cannot build it ({cause})") from cause
    return model

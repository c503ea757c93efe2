"""Recognizes what accelerate does to a module's forward when it only copies inputs to the GPU of the weights.

accelerate places a model on several devices by replacing the forwards of its modules. Code that moves inputs itself may
treat such modules as unchanged.
"""

from typing import Any

from torch import nn

__all__ = ["has_own_forward", "neutral_forward"]


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module computes what its class does, apart from the device of its inputs."""
    return "forward" not in vars(module) or neutral_forward(module) is not None


def neutral_forward(module: nn.Module) -> Any:
    """The forward among a module's attributes if it computes what the class does; None otherwise.

    It is one by which accelerate copies the inputs, or the class's own, which accelerate leaves behind.
    """
    names = vars(module)
    hook, forward = names.get("_hf_hook"), names.get("forward")
    if _is_of_class(forward, module):
        return forward
    kind = type(hook)
    places = (kind.__module__, kind.__name__) == ("accelerate.hooks", "AlignDevicesHook") and not vars(hook)["offload"]
    own = names.get("_old_forward")
    return forward if places and _is_of_class(own, module) and getattr(forward, "__wrapped__", None) is own else None


def _is_of_class(forward: Any, module: nn.Module) -> bool:
    return getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module

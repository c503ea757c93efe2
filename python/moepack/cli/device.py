"""The option `--device` of commands that run models."""

from typing import Any

import typer

__all__ = ["places", "usable_device"]


def places(name: str | None) -> dict[str, Any]:
    """Return the arguments of `moepack.load` that put a model where the option says."""
    if name is None:
        return {}
    return {"device_map": name} if name == "auto" else {"device": name}


def usable_device(name: str | None) -> str | None:
    """Return the name of a device that torch can use on this machine, or None; a usage error for any other."""
    if name is None or name == "cpu":
        return name
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch that was built without CUDA
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise typer.BadParameter(f"'{name}' cannot be used here: {reason}") from error
    return name

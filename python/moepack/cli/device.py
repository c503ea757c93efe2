"""The option `--device` of commands that run models."""

import typer

__all__ = ["usable_device"]


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

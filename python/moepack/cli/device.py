"""Where the weights are: options of commands that run models."""

from typing import Annotated, Any

import typer

__all__ = ["Approximate", "Device", "DeviceMemory", "Guess", "HostMemory", "Misses", "places", "usable_device"]

Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, or auto: all GPUs, then the CPU, layer by layer.")]
HostMemory = Annotated[
    str | None, typer.Option(help="Most memory for the weights, such as 8GB: the other experts stay on the drive.")
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(help="Most memory of --device cuda for the weights, such as 8GB: the host keeps the other experts."),
]
Misses = Annotated[
    str | None,
    typer.Option(help="With --device-memory: what the host keeps is moved, computed there, or auto: what is faster."),
]

Guess = Annotated[
    bool, typer.Option(help="With --host-memory: read ahead what the next layer is likely to want; changes no output.")
]
Approximate = Annotated[
    bool, typer.Option("--approximate", help="Let the layer before decide over channels (floe): outputs change.")
]


def places(
    device: str | None,
    host_memory: str | None = None,
    device_memory: str | None = None,
    misses: str | None = None,
    guess: bool = True,
    approximate: bool = False,
) -> dict[str, Any]:
    """Return the arguments of `moepack.load` that put a model where the options say."""
    memory: dict[str, Any] = {} if host_memory is None else {"host_memory": host_memory, "guess": guess}
    memory |= {} if device_memory is None else {"device_memory": device_memory}
    memory |= {} if misses is None else {"misses": misses}
    memory |= {"approximate": True} if approximate else {}
    if device is None:
        return memory
    return {"device_map": device, **memory} if device == "auto" else {"device": device, **memory}


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

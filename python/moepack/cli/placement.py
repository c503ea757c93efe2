"""Options that place the weights, for commands that run models."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from moepack.integrations.options import LoadOptions

__all__ = [
    "Approximate",
    "Device",
    "DeviceMemory",
    "Guess",
    "HostMemory",
    "KvBits",
    "Misses",
    "loading",
    "usable_device",
]

Device = Annotated[
    str | None,
    typer.Option(help="Device: `cpu`, `cuda`, `cuda:1`, or `auto`, which fills all GPUs layer by layer, then the CPU."),
]
HostMemory = Annotated[
    str | None,
    typer.Option(help="Limit the RAM for weights, for example 8GB. Experts that do not fit are read from disk."),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        help="Limit the GPU memory for weights, for example 8GB. Experts that do not fit stay in RAM. Needs "
        "--device cuda."
    ),
]
Misses = Annotated[
    str | None,
    typer.Option(
        help="With --device-memory, what happens to chosen experts that are in RAM: `moved` copies them to the GPU, "
        "`computed` runs them on the CPU, `auto` (default) splits them to finish soonest."
    ),
]
KvBits = Annotated[
    int | None,
    typer.Option(help="8 stores keys and values in 8 bits, in about half of the memory. Default: the model's dtype."),
]
Guess = Annotated[
    bool, typer.Option(help="With --host-memory, prefetch the likely experts of the next layer. Outputs do not change.")
]
Approximate = Annotated[
    bool, typer.Option("--approximate", help="Select channels (floe) with the previous layer's input. Outputs change.")
]


def loading(
    dtype: str,
    threads: int | None,
    mode: str | None,
    device: str | None,
    host_memory: str | None,
    device_memory: str | None,
    misses: str | None,
    **more: Any,
) -> "LoadOptions":
    """Return how a command loads its model, from its options; raises as `LoadOptions`."""
    from moepack.integrations.options import LoadOptions

    given: dict[str, Any] = {"device_map" if device == "auto" else "device": device, **more}
    given |= {"host_memory": host_memory, "device_memory": device_memory, "misses": misses or "auto"}
    return LoadOptions(dtype, threads, mode, **given)


def usable_device(name: str | None) -> str | None:
    """Return `name` if it is None or a device that torch can use here; raise a usage error otherwise."""
    if name is None or name == "cpu":
        return name
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch that was built without CUDA
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise typer.BadParameter(f"'{name}' cannot be used here: {reason}") from error
    return name

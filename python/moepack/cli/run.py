"""`moepack run`: from a name to a running model."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moepack.cli import options
from moepack.cli.console import plain_console
from moepack.cli.plan import exact_size, print_outlook
from moepack.cli.usage import wrong_usage
from moepack.memory import importing
from moepack.system.processes import run_instead

if TYPE_CHECKING:
    from moepack.pipeline.machines import Machine

__all__ = ["run_command"]

SHARE = 0.8
"""Share of the free memory that streamed experts may take."""


def run_command(
    model: options.Checkpoint,
    *,
    size: Annotated[
        str | None,
        typer.Option(help="Size of the packed model, for example 9GB. Default: the largest that fits this machine."),
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(help="Calibration text: a file, `self`, or `none`. Default: the built-in text.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve over HTTP instead of chatting.")] = False,
    port: Annotated[int, typer.Option(help="Port of --serve.", min=0, max=65535)] = 8000,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before packing.")] = False,
    keep_source: options.KeepSource = False,
    disk_budget: options.DiskBudget = None,
    prefer_packed: options.PreferPacked = False,
    config: options.Configuration = None,
    threads: options.Threads = None,
    quiet: options.Quiet = False,
) -> None:
    """Pack MODEL for this machine if necessary, and chat with it.

    Packed models are kept in the user's data directory: `moepack list` shows them, `moepack remove` deletes them. A
    packed MODEL runs at once. An interrupted run continues with the same command.
    """
    with importing():
        from moepack.cli.evaluate import quiet_transformers
        from moepack.pipeline.machines import this_machine

    quiet_transformers()
    path = _packed_already(model)
    if path is None:
        with wrong_usage():
            streaming = {"keep_source": keep_source, "disk_budget": disk_budget}
            path = _packed(model, size, calibration, yes, prefer_packed, streaming, config, threads, quiet)
    machine = this_machine(path.parent)
    command = ["serve", str(path), "--port", str(port)] if serve else ["chat", str(path)]
    command += [] if threads is None else ["--threads", str(threads)]
    command += _placement(path, machine)
    run_instead([sys.executable, "-m", "moepack", *command])


def _packed(
    model: str,
    size: str | None,
    calibration: str | None,
    yes: bool,
    prefer_packed: bool,
    streaming: dict[str, Any],
    config: Path | None,
    threads: int | None,
    quiet: bool,
) -> Path:
    """Return the directory of the packed model in the library, after packing it if it is not there.

    Raises:
        ValueError: no size fits this machine, or there is no terminal to ask.
    """
    with importing():
        from moepack.cli.compress import fetched, print_report, run
        from moepack.pipeline.library import entries, library, place_of, title_of
        from moepack.pipeline.outlook import outlook

    title = title_of(model)
    known = [entry for entry in entries(title) if size in (None, entry.size)]
    if complete := [entry for entry in known if entry.complete]:
        return complete[-1].path
    if size is None and known:
        size = known[-1].size  # an interrupted run
    sizes = () if size is None else (size,)
    found = outlook(model, sizes, None, library(), config=config, **streaming)
    if not quiet:
        print_outlook(found, plain_console())
    if found.best is None:
        raise ValueError("no size of this model fits this machine; choose one with --size")
    size = size or exact_size(found.best.nbytes)
    target = place_of(title, size)
    if not yes:
        if not sys.stdin.isatty():
            raise ValueError(
                "cannot ask whether to pack the model without a terminal; use --yes to pack without asking"
            )
        typer.confirm(f"pack to {size} in {target}?", abort=True)
    library().mkdir(parents=True, exist_ok=True)
    if prefer_packed and fetched(model, target, size):
        return target
    given = {"size": size, **({} if calibration is None else {"calibration": calibration})}
    report = run(
        model, target, "auto", given, dry_run=False, threads=threads, ray=None, mtp_bits=None, resume=True,
        config=config, quiet=quiet, **streaming,
    )  # fmt: skip
    if report is not None and not quiet:
        print_report(report)
    return target


def _packed_already(model: str) -> Path | None:
    """Return the directory of a model that is packed, here or on the Hub; None for other models.

    Raises:
        CorruptionError: the directory is a packed one whose manifest is damaged.
        DownloadError: the packed model cannot be downloaded.
    """
    import huggingface_hub

    from moepack.checkpoint.hub_model import hub_id
    from moepack.checkpoint.resolve import hub_failures, resolve_model
    from moepack.format.directory import read_manifest
    from moepack.format.manifest import MANIFEST

    found = hub_id(model)
    if found is None:
        path = Path(model)
        return path if (path / MANIFEST).exists() and read_manifest(path) else None
    cached = huggingface_hub.try_to_load_from_cache(found[0], MANIFEST, revision=found[1])
    try:
        packed = isinstance(cached, str) or huggingface_hub.HfApi().file_exists(found[0], MANIFEST, revision=found[1])
    except hub_failures():
        return None  # opening the model reports the reason
    return resolve_model(model) if packed else None


def _placement(path: Path, machine: "Machine") -> list[str]:
    """Return the options that place the weights of a packed model on this machine."""
    from moepack.format.directory import read_manifest
    from moepack.pipeline.costs import PROCESS
    from moepack.pipeline.machines import DRIVE, GPU, GPU_AND_MEMORY

    manifest = read_manifest(path)
    experts = sum(record.nbytes for record in manifest.packed().values() if record.experts)
    weights = sum(record.nbytes for record in manifest.tensors.values())
    places = machine.places(weights, experts, PROCESS)
    first = places[0] if places else DRIVE
    streamed = ["--host-memory", str(int(SHARE * (machine.memory or 0)))] if machine.memory else []
    return {GPU: ["--device", "cuda"], GPU_AND_MEMORY: ["--device", "auto"], DRIVE: streamed}.get(first, [])

"""`moepack compress`: compress a checkpoint into a packed directory."""

from collections.abc import Callable
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from moepack.cli import options, settings
from moepack.cli.console import plain_console
from moepack.cli.inspect import print_directory
from moepack.cli.placement import usable_device
from moepack.cli.preview import print_plan
from moepack.cli.usage import wrong_usage
from moepack.memory import importing
from moepack.methods import METHODS, create
from moepack.units import byte_count, nats, size, speed

if TYPE_CHECKING:
    from moepack.pipeline import CompressReport
    from moepack.pipeline.recipe import Recipe


EPILOG = settings.epilog


def compress_command(
    model: options.Checkpoint,
    out: Annotated[Path, typer.Argument(help="Output directory. It must not exist.")],
    *,
    dry_run: options.DryRun = False,
    report: options.Report = False,
    threads: options.Threads = None,
    ray: options.Ray = None,
    mtp_bits: options.MtpBits = None,
    resume: options.Resume = True,
    check: options.Check = None,
    keep_source: options.KeepSource = False,
    disk_budget: options.DiskBudget = None,
    prefer_packed: options.PreferPacked = False,
    config: options.Configuration = None,
    quiet: options.Quiet = False,
    recipe: options.Recipe = None,
    prune: options.Prune = None,
    prune_by: options.PruneBy = None,
    method: str | None = None,
    **method_settings: Any,
) -> None:
    """Compress MODEL into the packed directory OUT. Prints a plan first.

    Set the size of OUT with --size, --bits-per-weight or --ratio. The default is 4 bits per weight, but at most half of
    this machine's free memory. Quality is best with a calibration text of your own (--calibration). A Hub model is
    packed while it is downloaded; --dry-run reads only its headers. An interrupted run leaves OUT.partial; run the same
    command again to continue.
    """
    given = {key: value for key, value in method_settings.items() if value is not None}
    if ray is None:
        usable_device(given.get("device"))
    if prefer_packed and not dry_run and fetched(model, out, given.get("size")):
        print_next(model, out)
        return
    done = run(
        model, out, method, given,
        dry_run=dry_run, threads=threads, ray=ray, mtp_bits=mtp_bits, resume=resume, check=check,
        keep_source=keep_source, disk_budget=disk_budget, config=config, quiet=quiet, recipe=recipe,
        prune=prune, prune_by=prune_by,
    )  # fmt: skip
    if done is not None:
        print_done(done, model, out, report)


def fetched(model: str, out: Path, most: str | None) -> bool:
    """Download a packed version of a model if the Hub has one of at most a size; return whether it had."""
    with importing():
        from moepack.pipeline.prepacked import fetch_packed, find_packed

    with wrong_usage():
        version = find_packed(model, None if most is None else byte_count(most))
    if version is None:
        print(f"the Hub has no packed version of {model}" + ("" if most is None else f" of at most {most}"))
        return False
    print(f"found      {version.listing.model}: {size(version.nbytes)}, packed by its author")
    print(f"verified   {fetch_packed(version, out)}")
    return True


def command() -> Callable[..., None]:
    """Return `compress_command` with the settings of all methods as options, those that most people need first."""
    own = dict(signature(compress_command).parameters)
    method = typer.Option(help=f"Compression method: {', '.join(METHODS)}.", show_default="auto")
    own["method"] = own["method"].replace(annotation=Annotated[str | None, method])
    del own["method_settings"]
    arguments = [own.pop("model"), own.pop("out")]

    @wraps(compress_command)
    def made(**given: Any) -> None:
        compress_command(**given)

    parameters = [*arguments, *settings.parameters("basic"), *own.values(), *settings.parameters("expert")]
    made.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return made


def run(
    model: str,
    out: Path,
    method: str | None,
    given: dict[str, Any],
    *,
    dry_run: bool,
    threads: int | None,
    ray: str | None,
    mtp_bits: int | None,
    resume: bool,
    check: bool | None = None,
    keep_source: bool = False,
    disk_budget: str | None = None,
    config: Path | None = None,
    quiet: bool,
    recipe: Path | None = None,
    prune: str | None = None,
    prune_by: str | None = None,
) -> "CompressReport | None":
    """Print the plan, then compress. Return None after a dry run."""
    with importing():
        from moepack.cli.evaluate import quiet_transformers
        from moepack.format.atomic import refuse_existing
        from moepack.pipeline import compress
        from moepack.pipeline.distributed import refuse as refuse_sharing
        from moepack.pipeline.estimate import estimate
        from moepack.pipeline.pruning import Pruning
        from moepack.pipeline.recipe import Recipe
        from moepack.pipeline.share import leave_out
        from moepack.pipeline.source import opened
        from moepack.progress import terminal_progress

    quiet_transformers()
    console = plain_console(stderr=True)
    progress = terminal_progress(console, quiet)
    with wrong_usage():
        known = None if recipe is None else Recipe.read(recipe)
        if known is not None:
            mtp_bits = known.mtp_bits if mtp_bits is None else mtp_bits
        pruning = Pruning.of(prune, prune_by, None if known is None else known.pruning)
        method, given = _asked(known, method, given)
        chosen = create(method, **given)
        if ray is not None:
            refuse_sharing(chosen)
        try:
            refuse_existing(out)
            whole, shared = pruning is not None, ray is not None
            with opened(model, out.absolute(), keep_source, disk_budget, whole, shared, config) as source:
                chosen = leave_out(source, pruning, chosen, out.absolute(), progress, mtp_bits)
                plan = estimate(source, out, chosen, threads, progress, mtp_bits)
                if dry_run or not quiet:
                    print_plan(plan, plain_console())
                if dry_run:
                    return None
                return compress(
                    source, out, method=plan.plan or chosen,
                    mtp_bits=mtp_bits, threads=threads, ray=ray, resume=resume, check=check, progress=progress,
                    recipe=known,
                )  # fmt: skip
        except KeyboardInterrupt:
            raise interrupted(console, out) from None


def _asked(known: "Recipe | None", method: str | None, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the method and its settings: the given ones in place of a recipe's. Prints what they replace."""
    if known is None:
        settings.refuse_foreign(method or "auto", settings.without_names(given))
        return method or "auto", given
    settings.refuse_foreign(method or known.method, settings.without_names(given))
    method, given, said = known.merged(method, given)
    for note in said:
        print(f"note: {note}")
    return method, given


def interrupted(console: Console, out: Path) -> typer.Exit:
    """Print how to continue after Ctrl-C; return the exit to raise."""
    from moepack.pipeline import PARTIAL
    from moepack.pipeline.rewrite import STATE
    from moepack.pipeline.source import SOURCE

    kept = [file for suffix in (PARTIAL, STATE, SOURCE) if (file := out.with_name(out.name + suffix)).exists()]
    rest = f"the same command continues from {kept[0]}" if kept else "nothing was written yet"
    if out.exists():  # only its check was left
        rest = f"{out} is complete"
    console.print(f"interrupted; {rest}", soft_wrap=True)
    return typer.Exit(130)


def print_done(done: "CompressReport", model: str, out: Path, report: bool) -> None:
    """Print the result and the next steps, and with `report` a list of every tensor."""
    print_report(done)
    print_next(model, out)
    if report:
        print_directory(out)


def print_next(model: str, out: Path) -> None:
    """Print the next steps: inspect, measure, generate."""
    original, packed = quote(model), quote(str(out))
    print(f"next       moepack inspect {packed}")
    print(f"           moepack report {packed} --reference {original} --text FILE   (loss, KL, a page, a model card)")
    print(f'           moepack generate {packed} --prompt "..."')


def print_report(report: "CompressReport") -> None:
    """Print the sizes, the measured loss and the time of a finished job."""
    for note in report.notes:
        print(f"note: {note}")
    if report.skipped:
        print(f"not copied: {', '.join(report.skipped)}")
    experts = f"{size(report.expert_source_bytes)} -> {size(report.expert_bytes)}"
    print(f"experts    {experts} ({report.bits_per_weight:.3f} bits per weight)")
    if report.dense_weights:
        bits = 8 * report.dense_bytes / report.dense_weights
        print(
            f"dense      {size(report.dense_source_bytes)} -> {size(report.dense_bytes)} ({bits:.3f} bits per weight)"
        )
    ratio = report.source_bytes / max(report.packed_bytes, 1)
    print(f"directory  {size(report.source_bytes)} -> {size(report.packed_bytes)} ({ratio:.2f}x)")
    if report.increase is not None:
        print(f"loss       {nats(report.increase)} on part of the calibration text")
    rate = speed(report.weights_per_second)
    print(f"time       {report.seconds:.1f} s ({rate}), peak memory {size(report.peak_memory)}")
    print(f"wrote      {report.path}")

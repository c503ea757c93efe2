"""`moepack tune`: fine-tune the centroids and scales of a packed directory against the original model."""

from pathlib import Path
from typing import Annotated

import typer

from moepack.cli import options
from moepack.cli.console import plain_console
from moepack.cli.placement import usable_device
from moepack.cli.usage import wrong_usage
from moepack.memory import importing
from moepack.textfile import BUILT_IN


def tune_command(
    packed: Annotated[Path, typer.Argument(help="Packed directory made with --method codequant, rate or auto.")],
    original: Annotated[Path, typer.Argument(help="The original checkpoint: directory or Hub id.")],
    out: Annotated[Path, typer.Argument(help="Output directory. It must not exist.")],
    calibration: Annotated[
        str,
        typer.Option(help="Calibration text: text file, JSON Lines, directory, Hub data set, or self (see compress)."),
    ] = BUILT_IN,
    samples: Annotated[int, typer.Option(min=2, help="Number of calibration windows.")] = 128,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Gradient steps.")] = 200,
    rate: Annotated[
        float,
        typer.Option(
            help="Learning rate, relative to a codebook's largest centroid. Scales and gains use four times this rate."
        ),
    ] = 5e-4,
    batch: Annotated[int, typer.Option(min=1, help="Windows per step.")] = 8,
    router_weight: Annotated[
        float,
        typer.Option(
            help="Weight of the divergence of the routers in the training loss; that of the predictions is 1."
        ),
    ] = 1.0,
    device: Annotated[
        str, typer.Option(callback=usable_device, help="Device for both models, which run in float32 with gradients.")
    ] = "cpu",
    quiet: options.Quiet = False,
) -> None:
    """Fine-tune the centroids, scales and norm gains of PACKED to match the outputs of ORIGINAL.

    The codes do not change. Codebooks keep their size; coded integers grow by two bytes per row if rows are long. An
    interrupted run leaves nothing behind and cannot be continued.
    """
    with importing():
        from moepack.cli.evaluate import quiet_transformers
        from moepack.pipeline.tune import tune
        from moepack.progress import terminal_progress
        from moepack.tuning import TuneSettings

    quiet_transformers()
    console = plain_console(stderr=True)
    try:
        with wrong_usage():
            settings = TuneSettings(steps=steps, rate=rate, router_weight=router_weight, batch=batch)
            tuned = tune(
                packed, original, out, calibration=calibration, samples=samples, sequence_length=sequence_length,
                settings=settings, device=device, progress=terminal_progress(console, quiet),
            )  # fmt: skip
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written, and the same command starts over", soft_wrap=True)
        raise typer.Exit(130) from None
    for label, found in (("before", tuned.before), ("after", tuned.after)):
        print(f"{label:<7} predictions diverge by {found.logits:.5f} nats per token, routers by {found.routers:.5f}")
    print(f"wrote   {out}")

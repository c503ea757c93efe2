"""`moepack generate`: continue a prompt, token by token, and say how fast it went."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from moepack.cli.device import Device, HostMemory, places
from moepack.cli.usage import wrong_usage
from moepack.units import size

if TYPE_CHECKING:
    from moepack.runtime.streaming import Statistics

__all__ = ["generate_command"]


def generate_command(
    directory: Annotated[Path, typer.Argument(help="Model directory or hub id (ORGANIZATION/NAME), packed or not.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; for Switch with <extra_id_0> where text is missing.")],
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to generate.", min=1)] = 64,
    temperature: Annotated[
        float, typer.Option(help="0 always takes the likeliest token; above 0 it is drawn.", min=0.0)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Threads; by default all cores.", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto (the checkpoint's).")] = "auto",
    mode: Annotated[str | None, typer.Option(help="Products of packed weights: auto, exact, bf16 or int8.")] = None,
    resident: Annotated[
        bool, typer.Option("--resident", help="Copy the weights into memory first instead of mapping the files.")
    ] = False,
    device: Device = None,
    host_memory: HostMemory = None,
) -> None:
    """Continue a prompt: the text goes to standard output as it is made, the speed to standard error at the end."""
    from moepack.cli.evaluate import quiet_transformers
    from moepack.integrations.loading import open_model, open_tokenizer
    from moepack.memory import process_memory
    from moepack.runtime.generation import generate
    from moepack.runtime.streaming import statistics_of

    quiet_transformers()
    with wrong_usage():
        model = open_model(directory, dtype, threads, mode, resident, **places(device, host_memory))
        tokenizer = open_tokenizer(directory)
        if not model.config.is_encoder_decoder:
            _write(prompt)
        report = generate(
            *(model, tokenizer, prompt),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            on_text=_write,
        )
    _write("\n")
    memory, console = process_memory(), Console(stderr=True, highlight=False)
    console.print(
        f"{report.tokens} tokens, {report.tokens_per_second:.1f} tokens/s; "
        f"first token after {report.first_token_seconds:.3f} s ({report.prompt_tokens} tokens of prompt); "
        f"peak memory {memory.peak / 1e6:.0f} MB, of it now {memory.anonymous / 1e6:.0f} MB own "
        f"and {memory.mapped / 1e6:.0f} MB of mapped files",
        soft_wrap=True,
    )
    if (streamed := statistics_of(model)) is not None:
        console.print(_streaming(streamed), soft_wrap=True)


def _streaming(statistics: "Statistics") -> str:
    """What streaming did, in a line."""
    asked = statistics.hits + statistics.misses
    return (
        f"experts: {statistics.hits / max(asked, 1):.0%} of {asked} were in memory; {size(statistics.bytes_read)} read "
        f"in {statistics.reads} reads, {statistics.waited:.1f} s waited for them; at most {size(statistics.most)} kept"
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

"""`moepack generate`: continue a prompt, and report the speed."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moepack.cli.console import plain_console
from moepack.cli.options import (
    AnyModel,
    Dtype,
    MinP,
    Mode,
    RepetitionPenalty,
    Resident,
    Stop,
    System,
    Threads,
    TopK,
    TopP,
)
from moepack.cli.placement import Approximate, Device, DeviceMemory, Guess, HostMemory, KvBits, Misses, loading
from moepack.cli.usage import wrong_usage
from moepack.errors import TextError
from moepack.memory import importing
from moepack.textfile import read_text, standard_input
from moepack.units import size

if TYPE_CHECKING:
    from moepack.serving.text.generation import GenerationReport
    from moepack.stores.streaming import Statistics

__all__ = ["generate_command"]


def generate_command(
    directory: AnyModel,
    prompt: Annotated[
        str | None,
        typer.Option(help="Text to continue; - reads stdin. For Switch models, mark missing text with <extra_id_0>."),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with the text to continue (UTF-8).", exists=True, dir_okay=False)
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template to the prompt.")] = False,
    system: System = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens to generate.", min=1)] = 64,
    temperature: Annotated[
        float, typer.Option(help="0 picks the most likely token; above 0, tokens are sampled.", min=0.0)
    ] = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: Stop = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    threads: Threads = None,
    dtype: Dtype = "auto",
    mode: Mode = None,
    resident: Resident = False,
    device: Device = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    misses: Misses = None,
    kv_bits: KvBits = None,
    guess: Guess = True,
    approximate: Approximate = False,
) -> None:
    """Continue a prompt. The text is streamed to stdout; the speed is printed to stderr at the end."""
    with importing():
        from moepack.cli.evaluate import quiet_transformers
        from moepack.decoding.vocabulary import naming
        from moepack.integrations.loading import open_tokenizer, open_with
        from moepack.serving.text.conversation import conversation
        from moepack.serving.text.generation import generate
        from moepack.serving.text.sampling import Sampling, given

    quiet_transformers()
    with wrong_usage():
        text = _prompt(prompt, prompt_file)
        drawn = given(top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty)
        drawn |= {"temperature": temperature, "seed": seed}
        sampling = Sampling(max_new_tokens=max_new_tokens, stop=tuple(stop or ()), **drawn)
        if system is not None and not chat:
            raise ValueError("--system needs --chat")
        more = {"resident": resident, "guess": guess, "approximate": approximate, "kv_bits": kv_bits}
        options = loading(dtype, threads, mode, device, host_memory, device_memory, misses, **more)
        model = open_with(directory, options)
        tokenizer = open_tokenizer(directory)
        if not (chat or model.config.is_encoder_decoder):
            _write(text)
        asked = conversation(system, text) if chat else text
        with naming(tokenizer, prompt_file):
            report = generate(model, tokenizer, asked, sampling, on_text=_write)
    _write("\n")
    _tell(report, model)


def _tell(report: "GenerationReport", model: Any) -> None:
    """Print the speed and the memory use to stderr."""
    from moepack.decoding.stepping import stepping
    from moepack.memory import process_memory
    from moepack.stores.streaming import statistics_of

    memory, console = process_memory(), plain_console(stderr=True)
    console.print(
        f"{report.tokens} tokens, {report.tokens_per_second:.1f} tokens/s; "
        f"first token after {report.first_token_seconds:.3f} s ({report.prompt_tokens} prompt tokens); "
        f"peak memory {memory.peak / 1e6:.0f} MB, now {memory.anonymous / 1e6:.0f} MB anonymous "
        f"and {memory.mapped / 1e6:.0f} MB of mapped files",
        soft_wrap=True,
    )
    if not model.config.is_encoder_decoder and report.tokens > 1:
        console.print(str(stepping(model)), soft_wrap=True)
    if (streamed := statistics_of(model)) is not None:
        console.print(_streaming(streamed), soft_wrap=True)


def _prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt from the option, the file or stdin."""
    if (prompt is None) == (file is None):
        raise ValueError("give either --prompt or --prompt-file")
    if file is not None:
        if not (text := read_text(file)):
            raise TextError("is empty", file=file)
        return text
    return standard_input().read() if prompt == "-" else str(prompt)


def _streaming(statistics: "Statistics") -> str:
    """Summarize the streaming statistics in one line."""
    asked = statistics.hits + statistics.misses
    computed = f", {statistics.computed} multiplied by the CPU" if statistics.computed else ""
    found = (
        f"experts: {statistics.hits / max(asked, 1):.0%} of {asked} were in memory{computed}; "
        f"{size(statistics.bytes_read)} read in {statistics.reads} reads, waited {statistics.waited:.1f} s; "
        f"kept at most {size(statistics.most)}"
    )
    if not statistics.guessed:
        return found
    return (
        f"{found}; predictions covered {statistics.right / max(statistics.wanted, 1):.0%} of the chosen experts, "
        f"{statistics.right / statistics.guessed:.0%} of the predictions were right; "
        f"prefetches read {size(statistics.bytes_guessed)}, {size(statistics.in_vain)} of it unused, "
        f"in {statistics.hidden:.1f} s of background reads"
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

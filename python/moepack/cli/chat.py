"""`moepack chat`: chat with a model in the terminal.

In a terminal with prompt_toolkit installed (the extra `chat`), lines can be edited and recalled. Otherwise plain lines
are read, so that a script can drive the chat.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
from moepack.cli.placement import Device, DeviceMemory, HostMemory, KvBits, Misses, loading
from moepack.cli.usage import require_place, wrong_usage
from moepack.memory import importing
from moepack.system.interrupts import interrupt_answered
from moepack.textfile import standard_input

if TYPE_CHECKING:
    from moepack.serving.text.conversation import Conversation

__all__ = ["chat_command"]

HELP = """Enter sends, Alt-Enter starts a new line; lines between two \"\"\" lines are sent together.
Ctrl-C stops an answer. /clear forgets the conversation, /bye or Ctrl-D quits."""
QUOTES = '"""'
PROMPT = ">>> "


def chat_command(
    directory: AnyModel,
    system: System = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.", min=1)] = 1024,
    temperature: Annotated[
        float | None, typer.Option(help="0 picks the most likely token; default: the model's own setting.")
    ] = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: Stop = None,
    seed: Annotated[int | None, typer.Option(help="Random seed; default: a new one each time.")] = None,
    history: Annotated[Path | None, typer.Option(help="File that keeps your input history.")] = None,
    threads: Threads = None,
    dtype: Dtype = "auto",
    mode: Mode = None,
    resident: Resident = False,
    device: Device = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    misses: Misses = None,
    kv_bits: KvBits = None,
) -> None:
    """Chat with a model. A model without a chat template continues your text."""
    with importing():
        from moepack.cli.evaluate import quiet_transformers
        from moepack.decoding.stepping import tried
        from moepack.integrations.loading import open_tokenizer, open_with
        from moepack.serving.text.conversation import Conversation
        from moepack.serving.text.prompts import has_template
        from moepack.serving.text.sampling import Sampling

    quiet_transformers()
    with wrong_usage():
        require_place(history)
        caps = host_memory, device_memory, misses
        model = open_with(directory, loading(dtype, threads, mode, device, *caps, resident=resident, kv_bits=kv_bits))
        tokenizer = open_tokenizer(directory)
        drawn = {"top_p": top_p, "top_k": top_k, "min_p": min_p, "repetition_penalty": repetition_penalty}
        limits = {"max_new_tokens": max_new_tokens, "stop": tuple(stop or ()), "seed": seed}
        sampling = Sampling.of_model(model, temperature=temperature, **drawn, **limits)
        if system is not None and not has_template(tokenizer):
            raise ValueError("--system needs a model with a chat template")
    _say(HELP if has_template(tokenizer) else f"The model has no chat template: it continues your text.\n{HELP}")
    chat = Conversation(model, tokenizer, sampling, system)
    _say(f"Answers are {tried(model)}.")
    _talk(chat, _reader(history))


def _talk(chat: "Conversation", read: Callable[[str], str]) -> None:
    """Read messages and answer them until the user quits."""
    while True:
        try:
            text = _input(read)
        except EOFError:
            return
        except KeyboardInterrupt:
            interrupt_answered()
            _say("(Ctrl-D or /bye quits)")
            continue
        match text.strip():
            case "":
                pass
            case "/bye":
                return
            case "/clear":
                chat.messages.clear()
            case "/help":
                _say(HELP)
            case _:
                _answer(chat, text)


def _answer(chat: "Conversation", text: str) -> None:
    """Write an answer to stdout until it ends or the user presses Ctrl-C."""

    def write(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    try:
        chat.answer(text, write)
    except KeyboardInterrupt:
        interrupt_answered()
        _say("\n(stopped)")
    except ValueError as error:
        _say(str(error))
    sys.stdout.write("\n")


def _input(read: Callable[[str], str]) -> str:
    """Return one line, or all lines between two lines of quotes."""
    text = read(PROMPT)
    if text.strip() != QUOTES:
        return text
    lines: list[str] = []
    while (line := read("... ")).strip() != QUOTES:
        lines.append(line)
    return "\n".join(lines)


def _reader(history: Path | None) -> Callable[[str], str]:
    """Return the function that reads a line: a line editor if one is installed and stdin is a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or find_spec("prompt_toolkit") is None:
        return input if sys.stdin.isatty() else _line_reader()
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    kept = InMemoryHistory() if history is None else FileHistory(str(history))
    session: PromptSession[str] = PromptSession(history=kept, key_bindings=keys, multiline=True)
    return session.prompt


def _line_reader() -> Callable[[str], str]:
    """Return the function that reads lines from a non-terminal stdin, without a prompt."""
    text = standard_input()

    def next_line(prompt: str) -> str:
        if not (line := text.readline()):
            raise EOFError
        return line.rstrip("\n")

    return next_line


def _say(text: str) -> None:
    """Print a message that is not part of an answer to stderr."""
    print(text, file=sys.stderr)

"""`moepack chat`: talk to a model in the terminal.

Where prompt_toolkit is installed (the extra `chat`) and there is a terminal, lines can be edited and recalled; without,
lines are read as they come, so that a script can talk, too.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moepack.cli.device import Device, DeviceMemory, HostMemory, Misses, places
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
from moepack.cli.usage import require_place, wrong_usage
from moepack.textfile import standard_input

if TYPE_CHECKING:
    from moepack.runtime.conversation import Conversation

__all__ = ["chat_command"]

HELP = """Enter sends, Alt-Enter begins a new line; text between lines of \"\"\" is sent as one.
Ctrl-C stops an answer. /clear forgets what was said, /bye or Ctrl-D ends."""
QUOTES = '"""'
PROMPT = ">>> "


def chat_command(
    directory: AnyModel,
    system: System = None,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.", min=1)] = 1024,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token; by default what the model is published with.")
    ] = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: Stop = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random numbers; by default another each time.")] = None,
    history: Annotated[Path | None, typer.Option(help="File that keeps what you typed, for the next time.")] = None,
    threads: Threads = None,
    dtype: Dtype = "auto",
    mode: Mode = None,
    resident: Resident = False,
    device: Device = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    misses: Misses = None,
) -> None:
    """Talk to a model; one without a chat template continues what you write."""
    from moepack.cli.evaluate import quiet_transformers
    from moepack.integrations.loading import open_model, open_tokenizer
    from moepack.runtime.conversation import Conversation
    from moepack.runtime.prompts import has_template
    from moepack.runtime.sampling import Sampling
    from moepack.runtime.stepping import tried

    quiet_transformers()
    with wrong_usage():
        require_place(history)
        where = places(device, host_memory, device_memory, misses)
        model = open_model(directory, dtype, threads, mode, resident, **where)
        tokenizer = open_tokenizer(directory)
        drawn = {"top_p": top_p, "top_k": top_k, "min_p": min_p, "repetition_penalty": repetition_penalty}
        limits = {"max_new_tokens": max_new_tokens, "stop": tuple(stop or ()), "seed": seed}
        sampling = Sampling.of_model(model, temperature=temperature, **drawn, **limits)
        if system is not None and not has_template(tokenizer):
            raise ValueError("--system needs a model with a chat template")
    _say(HELP if has_template(tokenizer) else f"The model has no chat template: it continues what you write.\n{HELP}")
    chat = Conversation(model, tokenizer, sampling, system)
    _say(f"Answers are {tried(model)}.")
    _talk(chat, _reader(history))


def _talk(chat: "Conversation", read: Callable[[str], str]) -> None:
    """Answer until the user ends it."""
    while True:
        try:
            text = _input(read)
        except EOFError:
            return
        except KeyboardInterrupt:
            _say("(Ctrl-D or /bye ends)")
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
    """Write an answer to standard output until its end or Ctrl-C."""

    def write(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    try:
        chat.answer(text, write)
    except KeyboardInterrupt:
        _say("\n(stopped)")
    except ValueError as error:
        _say(str(error))
    sys.stdout.write("\n")


def _input(read: Callable[[str], str]) -> str:
    """A line, or all lines between two of quotes."""
    text = read(PROMPT)
    if text.strip() != QUOTES:
        return text
    lines: list[str] = []
    while (line := read("... ")).strip() != QUOTES:
        lines.append(line)
    return "\n".join(lines)


def _reader(history: Path | None) -> Callable[[str], str]:
    """What reads a line: an editor in a terminal, where there is one."""
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
    """What reads lines of standard input, which is no terminal, without a prompt."""
    text = standard_input()

    def next_line(prompt: str) -> str:
        if not (line := text.readline()):
            raise EOFError
        return line.rstrip("\n")

    return next_line


def _say(text: str) -> None:
    """Tell the user something that is no answer."""
    print(text, file=sys.stderr)

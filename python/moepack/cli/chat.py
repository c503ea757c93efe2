"""`moepack chat`: talk to a model in the terminal.

Where prompt_toolkit is installed (the extra `chat`) and there is a terminal, lines can be edited and recalled; without,
lines are read as they come, so that a script can talk, too.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from moepack.cli.device import Device, HostMemory, places
from moepack.cli.options import MinP, RepetitionPenalty, Stop, System, TopK, TopP
from moepack.cli.usage import wrong_usage

__all__ = ["chat_command"]

HELP = """Enter sends, Alt-Enter begins a new line; text between lines of \"\"\" is sent as one.
Ctrl-C stops an answer. /clear forgets what was said, /bye or Ctrl-D ends."""
QUOTES = '"""'
PROMPT = ">>> "


def chat_command(
    directory: Annotated[Path, typer.Argument(help="Model directory or hub id (ORGANIZATION/NAME), packed or not.")],
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
    threads: Annotated[int | None, typer.Option(help="Threads; by default all cores.", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto (the checkpoint's).")] = "auto",
    mode: Annotated[str | None, typer.Option(help="Products of packed weights: auto, exact, bf16 or int8.")] = None,
    resident: Annotated[
        bool, typer.Option("--resident", help="Copy the weights into memory first instead of mapping the files.")
    ] = False,
    device: Device = None,
    host_memory: HostMemory = None,
) -> None:
    """Talk to a model; one without a chat template continues what you write."""
    from moepack.cli.evaluate import quiet_transformers
    from moepack.integrations.loading import open_model, open_tokenizer
    from moepack.runtime.prompts import has_template
    from moepack.runtime.sampling import Sampling

    quiet_transformers()
    with wrong_usage():
        model = open_model(directory, dtype, threads, mode, resident, **places(device, host_memory))
        tokenizer = open_tokenizer(directory)
        drawn = {"top_p": top_p, "top_k": top_k, "min_p": min_p, "repetition_penalty": repetition_penalty}
        limits = {"max_new_tokens": max_new_tokens, "stop": tuple(stop or ()), "seed": seed}
        sampling = Sampling.of_model(model, temperature=temperature, **drawn, **limits)
        if system is not None and not has_template(tokenizer):
            raise ValueError("--system needs a model with a chat template")
        chat = Chat(model, tokenizer, sampling, system)
    _say(HELP if chat.has_template else f"The model has no chat template: it continues what you write.\n{HELP}")
    _talk(chat, _reader(history))


@dataclass
class Chat:
    """A conversation: what was said, and what the model keeps of it.

    Attributes:
        messages: after the system prompt, in turns.
        note: takes remarks for the user.
    """

    model: Any
    tokenizer: Any
    sampling: Any
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    note: Callable[[str], None] = lambda text: _say(text)

    def __post_init__(self) -> None:
        from moepack.runtime.generation import Memory
        from moepack.runtime.prompts import has_template

        self.has_template = has_template(self.tokenizer)
        self._memory = None if self.model.config.is_encoder_decoder else Memory()

    def answer(self, text: str) -> None:
        """Write an answer to standard output; Ctrl-C ends it, and what has been written counts as the answer."""
        from moepack.runtime.generation import generate

        pieces: list[str] = []
        if self.has_template:
            self.messages.append({"role": "user", "content": text})
            self._forget()

        def write(piece: str) -> None:
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()

        try:
            prompt = self._all() if self.has_template else text
            generate(self.model, self.tokenizer, prompt, self.sampling, on_text=write, memory=self._memory)
        except KeyboardInterrupt:
            self.note("\n(stopped)")
        except ValueError as error:
            self.messages = self.messages[:-1]
            self.note(str(error))
            return
        sys.stdout.write("\n")
        if self.has_template:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _all(self) -> list[dict[str, str]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.messages]

    def _forget(self) -> None:
        """Leave out the oldest turns where all of them and an answer are more than the model was made for."""
        from moepack.runtime.prompts import positions, prompt_ids

        limit, before = positions(self.model), len(self.messages)
        while limit is not None and len(self.messages) > 2:
            if len(prompt_ids(self.tokenizer, self._all())) + self.sampling.max_new_tokens <= limit:
                break
            del self.messages[:2]
        if len(self.messages) < before:
            self.note("(the oldest messages are left out: the model was not made for so many)")


def _talk(chat: Chat, read: Callable[[str], str]) -> None:
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
                chat.answer(text)


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
        return input if sys.stdin.isatty() else _next_line
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    kept = InMemoryHistory() if history is None else FileHistory(str(history))
    session: PromptSession[str] = PromptSession(history=kept, key_bindings=keys, multiline=True)
    return session.prompt


def _next_line(prompt: str) -> str:
    """A line of standard input, which is no terminal, without a prompt."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _say(text: str) -> None:
    """Tell the user something that is no answer."""
    print(text, file=sys.stderr)

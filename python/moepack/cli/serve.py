"""`moepack serve`: serve a model over HTTP with OpenAI's API."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moepack.cli.command import NAMED, command_line
from moepack.cli.options import AnyModel, Dtype, MinP, Mode, RepetitionPenalty, Resident, Threads, TopK, TopP
from moepack.cli.placement import Device, DeviceMemory, HostMemory, KvBits, Misses, loading
from moepack.cli.usage import wrong_usage
from moepack.cli.vllm import replace_by_vllm
from moepack.errors import LoadError
from moepack.memory import importing
from moepack.textfile import read_text
from moepack.units import byte_count

if TYPE_CHECKING:
    from moepack.decoding.stepping import Stepping
    from moepack.integrations.options import LoadOptions
    from moepack.serving.engine import Engine

__all__ = ["serve_command"]

LOCAL = ("127.0.0.1", "localhost")


Host = Annotated[
    str, typer.Option(help="Address to listen on, or unix:PATH for a Unix socket; default: this machine only.")
]
Port = Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)]
ApiKey = Annotated[
    str | None, typer.Option(help="API key that clients must send.", envvar="MOEPACK_API_KEY", show_envvar=True)
]
Name = Annotated[str | None, typer.Option(help="Model name in the API; default: the directory's name.")]
Slots = Annotated[int, typer.Option(help="Maximum number of requests that are processed concurrently.", min=1)]
Queue = Annotated[int, typer.Option(help="Maximum number of waiting requests.", min=0)]
Context = Annotated[
    int | None, typer.Option(help="Maximum tokens of a request, prompt plus answer; default: the model's limit.", min=2)
]
MaxNewTokens = Annotated[int, typer.Option(help="Maximum tokens per answer if the request sets none.", min=1)]
Timeout = Annotated[float, typer.Option(help="Maximum seconds per request, including waiting.", min=0.1)]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Make answers bitwise independent of concurrent requests. Slower.")
]
MaxBody = Annotated[str, typer.Option(help="Maximum size of a request body, such as 4MB.")]
CorsOrigin = Annotated[
    list[str] | None, typer.Option(help="Origin whose web pages may send requests, or `*` for all; may be repeated.")
]
ChatTemplate = Annotated[
    Path | None, typer.Option(help="File with a chat template that replaces the model's.", metavar="FILE")
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(
        help="Variables of the chat template, unless a request sets them, such as '{\"enable_thinking\": false}'.",
        metavar="JSON",
    ),
]
Temperature = Annotated[
    float | None, typer.Option(help="Temperature if the request sets none; default: the model's own, or 0.")
]
Lora = Annotated[
    list[str] | None,
    typer.Option(help="LoRA adapter that requests choose by NAME as their model; may be repeated.", metavar=NAMED),
]
Drain = Annotated[
    float, typer.Option(help="Seconds that running requests may still take after Ctrl-C or SIGTERM.", min=0)
]
LogPrompts = Annotated[bool, typer.Option("--log-prompts", help="Log the bodies of requests.")]
Program = Annotated[
    Literal["moepack", "vllm"], typer.Option("--engine", help="Program that serves: moepack, or vLLM if installed.")
]
PrintUnit = Annotated[bool, typer.Option("--print-unit", help="Print a systemd unit that runs this command, and exit.")]


def serve_command(
    context_: typer.Context,
    directory: AnyModel,
    host: Host = LOCAL[0],
    port: Port = 8000,
    api_key: ApiKey = None,
    name: Name = None,
    slots: Slots = 16,
    queue: Queue = 256,
    context: Context = None,
    max_new_tokens: MaxNewTokens = 512,
    timeout: Timeout = 600.0,
    deterministic: Deterministic = False,
    max_body: MaxBody = "4MB",
    cors_origin: CorsOrigin = None,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: ChatTemplateKwargs = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    lora: Lora = None,
    drain: Drain = 5.0,
    log_prompts: LogPrompts = False,
    print_unit: PrintUnit = False,
    threads: Threads = None,
    dtype: Dtype = "auto",
    mode: Mode = None,
    resident: Resident = False,
    device: Device = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    misses: Misses = None,
    kv_bits: KvBits = None,
    engine: Program = "moepack",
) -> None:
    """Serve a model over HTTP with OpenAI's and Anthropic's API (docs/serving.md).

    Answers can be streamed. A chat page is at /. Sampling options apply to requests that do not set them.
    """
    called = name or (directory.resolve().name if directory.exists() else str(directory))
    if engine == "vllm":
        with wrong_usage():
            return replace_by_vllm(context_, str(directory), called)
    if print_unit:
        return _print_unit(context_, called, drain, device)
    _prepare()
    with importing():
        from moepack.checkpoint.resolve import resolve_model
        from moepack.serving.http.address import require_free
        from moepack.serving.http.listening import listen
        from moepack.serving.http.server import Settings, create_app

    drawn = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    with wrong_usage():
        is_private, path = _is_private(host), resolve_model(directory)
        require_free(host, port)
        settings = Settings(
            called, path, api_key, max_new_tokens, byte_count(max_body), LOCAL if host in LOCAL else (),
            tuple(cors_origin or ()), None if chat_template is None else read_text(chat_template),
            _variables(chat_template_kwargs), _sampling(**drawn, repetition_penalty=repetition_penalty), log_prompts,
        )  # fmt: skip
        caps = host_memory, device_memory, misses
        options = loading(dtype, threads, mode, device, *caps, resident=resident, kv_bits=kv_bits)
        loaded = _adapters(lora or [])
        serving, stepping = _engine(path, options, loaded, slots, queue, context, timeout, deterministic)
        application = create_app(serving, settings)
    _announce(called, slots, serving, stepping, is_open=not is_private and api_key is None)
    listen(application, serving, host, port, drain)


def _print_unit(called_with: typer.Context, name: str, drain: float, device: str | None) -> None:
    """Print a systemd unit for this command line, without its API key."""
    from moepack.serving.http.unit import unit

    command = command_line(called_with, without={"print_unit", "api_key"})
    print(unit(command, name, drain, has_gpu=device is not None), end="")


def _prepare() -> None:
    """Check that the server's packages are installed, and silence transformers' progress bars."""
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise LoadError("serving needs FastAPI and uvicorn: pip install 'moepack[serve]'")
    from moepack.cli.evaluate import quiet_transformers

    quiet_transformers()


def _announce(name: str, slots: int, engine: "Engine", stepping: "Stepping", is_open: bool) -> None:
    if is_open:
        print("warning: without --api-key, anyone who can reach this address can use the model", file=sys.stderr)
    context = f"{engine.context} tokens each (prompt and answer)"
    print(f"'{name}': up to {slots} concurrent requests, {context}", file=sys.stderr)
    print(f"a single request is {stepping}", file=sys.stderr)


def _is_private(host: str) -> bool:
    """Return whether only this machine can connect; raises ValueError for a Unix socket without a path."""
    from moepack.serving.http.unixsocket import unix_path

    return unix_path(host) is not None or host in LOCAL


def _sampling(**settings: Any) -> dict[str, Any]:
    """Return the sampling settings that are not None; raises ValueError if one is out of range."""
    with importing():
        from moepack.serving.text.sampling import Sampling, given

    sampling = given(**settings)
    Sampling(**sampling)
    return sampling


def _engine(
    path: Path,
    options: "LoadOptions",
    adapters: dict[str, Path],
    slots: int,
    queue: int,
    context: int | None,
    timeout: float,
    deterministic: bool,
) -> tuple["Engine", "Stepping"]:
    """Load a model; return its engine, and how it decodes a single sequence."""
    with importing():
        from moepack.decoding.stepping import tried
        from moepack.integrations.loading import open_tokenizer, open_with
        from moepack.serving.adapters import Adapters
        from moepack.serving.engine import Engine

    model = open_with(path, options)
    stepping = tried(model)
    adapted = Adapters(model, adapters)
    return Engine(model, open_tokenizer(path), slots, queue, context, timeout, adapted, deterministic), stepping


def _adapters(given: list[str]) -> dict[str, Path]:
    """Return the directories of `--lora`.

    Raises:
        ValueError: an option is not NAME=DIR, or a name is used twice.
    """
    found: dict[str, Path] = {}
    for one in given:
        name, equals, directory = one.partition("=")
        if not (name and equals and directory):
            raise ValueError(f"--lora must be NAME=DIR, not '{one}'")
        if name in found:
            raise ValueError(f"--lora gives the name '{name}' twice")
        found[name] = Path(directory)
    return found


def _variables(text: str | None) -> dict[str, Any]:
    """Return the variables of `--chat-template-kwargs`.

    Raises:
        ValueError: the text is not a JSON object.
    """
    try:
        variables = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"--chat-template-kwargs must be a JSON object: {error}") from error
    if not isinstance(variables, dict):
        raise ValueError("--chat-template-kwargs must be a JSON object")
    return variables

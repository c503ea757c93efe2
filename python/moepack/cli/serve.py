"""`moepack serve`: serve a model over HTTP with OpenAI's API."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from moepack.cli.command import command_line
from moepack.cli.device import Device, DeviceMemory, HostMemory, Misses, places
from moepack.cli.options import AnyModel, Dtype, MinP, Mode, RepetitionPenalty, Resident, Threads, TopK, TopP
from moepack.cli.usage import wrong_usage
from moepack.errors import LoadError
from moepack.textfile import read_text
from moepack.units import byte_count

__all__ = ["serve_command"]

LOCAL = ("127.0.0.1", "localhost")


def serve_command(
    context_: typer.Context,
    directory: AnyModel,
    host: Annotated[
        str, typer.Option(help="Address to listen on, or unix:PATH for a Unix socket; default: this machine only.")
    ] = LOCAL[0],
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, typer.Option(help="API key that clients must send.", envvar="MOEPACK_API_KEY", show_envvar=True)
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name in the API; default: the directory's name.")] = None,
    slots: Annotated[int, typer.Option(help="Maximum concurrent answers.", min=1)] = 16,
    queue: Annotated[int, typer.Option(help="Maximum requests waiting for a slot.", min=0)] = 256,
    context: Annotated[
        int | None, typer.Option(help="Maximum tokens of prompt plus answer; default: the model's limit.", min=2)
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Maximum tokens per answer if the request sets none.", min=1)
    ] = 512,
    timeout: Annotated[float, typer.Option(help="Maximum seconds per answer, including waiting.", min=0.1)] = 600.0,
    max_body: Annotated[str, typer.Option(help="Maximum size of a request body, such as 4MB.")] = "4MB",
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose web pages may send requests, or * for all; may be repeated."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a chat template that replaces the model's.", metavar="FILE")
    ] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            help="Variables of the chat template, unless a request sets them, such as '{\"enable_thinking\": false}'.",
            metavar="JSON",
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature if the request sets none; default: the model's own, or 0.")
    ] = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            help="LoRA adapter that requests choose by NAME as their model; may be repeated.", metavar="NAME=DIR"
        ),
    ] = None,
    drain: Annotated[
        float, typer.Option(help="Seconds that running answers may take after Ctrl-C or SIGTERM.", min=0)
    ] = 5.0,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Log the bodies of requests.")] = False,
    print_unit: Annotated[
        bool, typer.Option("--print-unit", help="Print a systemd unit that runs this command, and exit.")
    ] = False,
    threads: Threads = None,
    dtype: Dtype = "auto",
    mode: Mode = None,
    resident: Resident = False,
    device: Device = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    misses: Misses = None,
) -> None:
    """Serve a model over HTTP with OpenAI's and Anthropic's API (docs/serving.md).

    Answers can be streamed. A chat page is at /. Sampling options apply to requests that do not set them.
    """
    called = name or (directory.resolve().name if directory.exists() else str(directory))
    if print_unit:
        from moepack.serving.http.unit import unit

        command = command_line(context_, without={"print_unit", "api_key"})
        print(unit(command, called, drain, has_gpu=device is not None), end="")
        return
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise LoadError("serving needs FastAPI and uvicorn: pip install 'moepack[serve]'")
    from moepack.checkpoint.resolve import resolve_model
    from moepack.cli.evaluate import quiet_transformers
    from moepack.decoding.stepping import tried
    from moepack.integrations.loading import open_model, open_tokenizer
    from moepack.serving.adapters import Adapters
    from moepack.serving.engine import Engine
    from moepack.serving.http.listening import listen
    from moepack.serving.http.server import Settings, create_app
    from moepack.serving.http.unixsocket import unix_path
    from moepack.serving.text.sampling import Sampling, given

    quiet_transformers()
    with wrong_usage():
        is_private = unix_path(host) is not None
        path = resolve_model(directory)
        hosts = LOCAL if host in LOCAL else ()
        sampling = given(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty
        )
        Sampling(**sampling)
        settings = Settings(
            called,
            path,
            api_key,
            max_new_tokens,
            byte_count(max_body),
            hosts,
            tuple(cors_origin or ()),
            None if chat_template is None else read_text(chat_template),
            _variables(chat_template_kwargs),
            sampling,
            log_prompts,
        )
        where = places(device, host_memory, device_memory, misses)
        model = open_model(path, dtype, threads, mode, resident, **where)
        stepping = tried(model)
        adapters = Adapters(model, _adapters(lora or []))
        engine = Engine(model, open_tokenizer(path), slots, queue, context, timeout, adapters)
        application = create_app(engine, settings)
    if host not in LOCAL and not is_private and api_key is None:
        print("warning: without --api-key, anyone who can reach this address can use the model", file=sys.stderr)
    print(f"'{settings.name}': up to {slots} concurrent answers, {engine.context} tokens each", file=sys.stderr)
    print(f"a single sequence is {stepping}", file=sys.stderr)
    listen(application, engine, host, port, drain)


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

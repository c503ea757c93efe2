"""`moepack serve`: serve a model over HTTP with OpenAI's API."""

import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from moepack.cli.device import Device, DeviceMemory, HostMemory, Misses, loading
from moepack.cli.options import AnyModel, Dtype, Mode, Resident, Threads
from moepack.cli.usage import wrong_usage
from moepack.errors import LoadError
from moepack.units import byte_count

__all__ = ["serve_command"]

LOCAL = ("127.0.0.1", "localhost")


def serve_command(
    directory: AnyModel,
    host: Annotated[str, typer.Option(help="Address to listen on; default: this machine only.")] = LOCAL[0],
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
    threads: Threads = None,
    dtype: Dtype = "auto",
    mode: Mode = None,
    resident: Resident = False,
    device: Device = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    misses: Misses = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions and /v1/models.

    Answers can be streamed.
    """
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise LoadError("serving needs FastAPI and uvicorn: pip install 'moepack[serve]'")
    from moepack.checkpoint.resolve import resolve_model
    from moepack.cli.evaluate import quiet_transformers
    from moepack.decoding.stepping import tried
    from moepack.integrations.loading import open_tokenizer, open_with
    from moepack.serving.engine import Engine
    from moepack.serving.http.listening import listen
    from moepack.serving.http.server import Settings, create_app

    quiet_transformers()
    with wrong_usage():
        path = resolve_model(directory)
        hosts = LOCAL if host in LOCAL else ()
        called = name or (directory.resolve().name if directory.exists() else str(directory))
        settings = Settings(called, path, api_key, max_new_tokens, byte_count(max_body), hosts)
        caps = host_memory, device_memory, misses
        model = open_with(path, loading(dtype, threads, mode, device, *caps, resident=resident))
        stepping = tried(model)
        engine = Engine(model, open_tokenizer(path), slots, queue, context, timeout)
    if host not in LOCAL and api_key is None:
        print("warning: without --api-key, anyone who can reach this address can use the model", file=sys.stderr)
    print(f"'{settings.name}': up to {slots} concurrent answers, {engine.context} tokens each", file=sys.stderr)
    print(f"a single sequence is {stepping}", file=sys.stderr)
    listen(create_app(engine, settings), engine, host, port)

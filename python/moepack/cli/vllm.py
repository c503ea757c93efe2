"""`moepack serve --engine vllm`: starts vLLM's server with the options of `moepack serve`."""

import json
import os
import sys
from importlib.util import find_spec
from typing import Any

import typer

from moepack.errors import LoadError
from moepack.system.processes import run_instead

__all__ = ["replace_by_vllm"]

RENAMED = {
    "port": "--port",
    "name": "--served-model-name",
    "slots": "--max-num-seqs",
    "context": "--max-model-len",
    "chat_template": "--chat-template",
    "dtype": "--dtype",
}
"""Options of `moepack serve` that vLLM has under another name, by parameter."""

DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""Sampling options, which vLLM takes as one JSON object."""

HONOURED = frozenset([*RENAMED, *DEFAULTS, "engine", "directory", "host", "api_key", "cors_origin"])


def replace_by_vllm(context: typer.Context, path: str, name: str) -> None:
    """Replace this process by vLLM's server.

    Args:
        context: the context of `serve`, whose options are passed on.
        path: the model.
        name: the model's name in the API.

    Raises:
        LoadError: vLLM is not installed.
        ValueError: an option is given that vLLM does not have.
    """
    arguments = vllm_arguments(context, path, name)
    if find_spec("vllm") is None:
        raise LoadError("vLLM is not installed: pip install 'moepack[vllm]'")
    if context.params["api_key"] is not None:
        os.environ["VLLM_API_KEY"] = context.params["api_key"]
    sys.stderr.flush()
    run_instead([sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments])


def vllm_arguments(context: typer.Context, path: str, name: str) -> list[str]:
    """Return the arguments of vLLM's server. The API key is passed in the environment, not here.

    Raises:
        ValueError: an option is given that vLLM does not have.
    """
    given = {each: value for each, value in context.params.items() if _is_given(context, each)}
    for each in sorted(given.keys() - HONOURED):
        raise ValueError(f"vLLM has no option like --{each.replace('_', '-')}: leave it out, or use --engine moepack")
    arguments = ["--model", path, *_host(context.params["host"])]
    for parameter, option in RENAMED.items():
        value = {**context.params, "name": name}[parameter]
        if value is not None:
            arguments += [option, str(value)]
    if context.params["cors_origin"]:
        arguments += ["--allowed-origins", json.dumps(context.params["cors_origin"])]
    sampling: dict[str, Any] = {each: given[each] for each in DEFAULTS if given.get(each) is not None}
    if sampling:
        arguments += ["--override-generation-config", json.dumps(sampling)]
    return arguments


def _is_given(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _host(host: str) -> list[str]:
    return ["--uds", host.removeprefix("unix:")] if host.startswith("unix:") else ["--host", host]

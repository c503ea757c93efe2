"""How models are loaded: one value that Python and every command build and pass on."""

from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

import moepack
from command_support import run
from moepack.integrations.loading import open_model
from places import NOVEL, TINY_MOE


@pytest.mark.parametrize("function", [moepack.load, open_model])
def test_a_call_takes_the_fields_of_the_options(function: Any) -> None:
    first, *others = signature(function).parameters.values()
    assert first.name == "directory"
    assert [(each.name, each.default) for each in others] == [(e.name, e.default) for e in fields(moepack.LoadOptions)]


def test_options_are_given_in_order_or_by_name(mixtral: Path) -> None:
    for model in (open_model(mixtral, torch.bfloat16), open_model(mixtral, dtype="bfloat16")):
        assert next(model.parameters()).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="colour"):
        open_model(mixtral, colour=1)


CONFLICTS = [
    ({"dtype": "int3"}, "dtype must be one of float32, bfloat16, float16 or auto, got 'int3'"),
    ({"device": "cpu", "device_map": "auto"}, "device and device_map are mutually exclusive"),
    ({"device": "gpu"}, "device must be cpu, cuda or a GPU such as cuda:0, not 'gpu'"),
    ({"device_memory": "8GB"}, "device_memory needs a model on one GPU"),
    ({"device_memory": "8GB", "device": "cpu"}, "device_memory needs a model on one GPU"),
    ({"device_memory": "8GB", "device": "cuda", "resident": True}, "device_memory needs a model on one GPU"),
    ({"misses": "guessed"}, "misses must be one of"),
    ({"misses": "moved"}, "misses needs device_memory"),
    ({"resident": True, "device": "cuda"}, "resident weights are on the CPU"),
    ({"resident": True, "device_map": "auto"}, "resident weights are on the CPU"),
    ({"resident": True, "host_memory": "8GB"}, "host_memory needs a model on the CPU"),
    ({"host_memory": "8GB", "device": "cuda"}, "host_memory needs a model on the CPU"),
    ({"host_memory": "much"}, "much"),
    ({"guess": False}, "guess=False needs host_memory"),
    ({"guess": False, "host_memory": "8GB", "device_memory": "8GB", "device": "cuda"}, "guess=False needs host_memory"),
]


@pytest.mark.parametrize(("given", "message"), CONFLICTS)
def test_conflicts_are_refused_before_anything_is_read(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        moepack.load(tmp_path / "absent", **given)


def test_caps_are_bytes_and_devices_are_placed_once() -> None:
    plain = moepack.LoadOptions(host_memory="8GB", device="cpu")
    assert (plain.host_cap, plain.device_cap, plain.placement) == (8 * 10**9, None, None)
    capped = moepack.LoadOptions(device="cuda:1", device_memory="1GB", host_memory="2GB", misses="moved")
    assert capped.placement is None and capped.device_cap == 10**9
    assert moepack.LoadOptions(device="cuda:1").placement == {"": torch.device("cuda", 1)}


SHARED = ["--dtype", "bfloat16", "--threads", "2", "--mode", "exact", "--host-memory", "8GB"]
COMMANDS = {
    "generate": (["--prompt", "a", "--no-guess", "--approximate"], {"guess": False, "approximate": True}),
    "chat": ([], {}),
    "serve": ([], {}),
    "eval": (["--text", NOVEL, "--chars", 100, "--approximate"], {"approximate": True}),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_build_the_same_options(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[moepack.LoadOptions] = []

    def opened(_: Any, options: moepack.LoadOptions) -> None:
        seen.append(options)
        raise moepack.LoadError("was not loaded")

    for module in ("moepack.integrations.loading", "moepack.evaluation.models"):
        monkeypatch.setattr(f"{module}.open_with", opened)
    arguments, more = COMMANDS[command]
    threads = torch.get_num_threads()
    code, _, error = run(capsys, command, TINY_MOE, *SHARED, *arguments)
    torch.set_num_threads(threads)
    assert code == 1 and "was not loaded" in error
    assert seen == [moepack.LoadOptions("bfloat16", 2, "exact", host_memory="8GB", **more)]

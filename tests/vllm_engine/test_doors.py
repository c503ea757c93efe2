"""How vLLM opens a packed directory: without options, with wrong options, in a version that is not supported."""

import subprocess
import sys
from pathlib import Path

import pytest

from moepack import LoadError
from moepack.backends.gpu import prompt
from moepack.vllm import settings
from vllm_support import vllm

VERSION = """
import sys, vllm
vllm.__version__ = sys.argv[2]
vllm.EngineArgs(model=sys.argv[1], skip_tokenizer_init=True).create_model_config()
"""


def configured(directory: Path, **settings: object) -> object:
    return vllm.EngineArgs(model=str(directory), max_model_len=64, **settings).create_engine_config()


def test_a_packed_directory_needs_no_load_format(packed: Path) -> None:
    assert configured(packed).load_config.load_format == "moepack"


def test_an_unpacked_directory_keeps_the_load_format(mixtral: Path) -> None:
    assert configured(mixtral).load_config.load_format == "auto"


@pytest.mark.parametrize("load_format", ["dummy", "safetensors"])
def test_a_load_format_that_reads_packed_bytes_as_weights_is_rejected(packed: Path, load_format: str) -> None:
    with pytest.raises(LoadError, match=f"leave out --load-format {load_format}"):
        configured(packed, load_format=load_format)


def test_the_load_format_is_rejected_for_an_unpacked_directory(mixtral: Path) -> None:
    with pytest.raises(LoadError, match="leave out --load-format moepack"):
        configured(mixtral, load_format="moepack")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the settings take the machine for one with an H100."""
    monkeypatch.setattr(settings, "_on_hopper", lambda: True)


def test_hopper_records_graphs_of_any_number_of_tokens(packed: Path, hopper: None) -> None:
    compilation = configured(packed, dtype="bfloat16").compilation_config
    assert compilation.max_cudagraph_capture_size != settings.GRAPH_TOKENS


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_experts_that_are_not_decoded_at_once_limit_graphs(
    packed: Path, dtype: str, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "DECODED_BYTES", prompt.DECODED_BYTES if dtype == "float16" else 100)
    compilation = configured(packed, dtype=dtype).compilation_config
    assert compilation.max_cudagraph_capture_size == settings.GRAPH_TOKENS


def test_a_version_outside_of_the_range_rejects_packed_directories(packed: Path) -> None:
    command = [sys.executable, "-c", VERSION, str(packed), "0.99.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    message = "moepack supports vLLM from 0.32 to below 0.34, but vLLM 0.99.0 is installed"
    assert done.returncode and message in done.stderr.splitlines()[-1]

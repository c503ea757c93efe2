"""Every packed format, packed by every method, in vLLM's engine."""

from collections.abc import Callable
from pathlib import Path

import pytest

import moepack
from fault_support import every_method
from moepack.export import export
from moepack.methods import METHODS
from moepack.registry import kinds
from packed_support import manifest_of
from vllm_support import answers, assert_agrees, engine, packed_names

NAMES = (*METHODS, "finequant with a text", "finequant with codebooks")


@pytest.fixture(scope="module")
def pack(qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a method's name to the directory that it packs."""
    root = tmp_path_factory.mktemp("methods")
    methods = every_method(root)

    def directory(name: str) -> Path:
        if not (root / name).exists():
            moepack.compress(qwen3_moe, root / name, method=methods[name])
        return root / name

    return directory


@pytest.mark.parametrize("name", sorted({*NAMES} - {"floe"}))
def test_a_method_gives_the_answers_of_our_own_runtime(pack: Callable[[str], Path], name: str) -> None:
    directory = pack(name)
    with engine(directory, load_format="moepack") as running:
        assert packed_names(running) >= manifest_of(directory).packed().keys()
        assert_agrees(running, answers(directory))


def test_experts_that_skip_channels_are_decoded_and_compute_all_of_them(
    pack: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = pack("floe")
    export(directory, tmp_path / "plain")
    with engine(directory, load_format="moepack") as running:
        assert_agrees(running, answers(tmp_path / "plain"))


def test_the_methods_pack_every_format(pack: Callable[[str], Path]) -> None:
    found = {record.kind for name in NAMES for record in manifest_of(pack(name)).packed().values()}
    assert found >= kinds() - {"test-dense", "coded-device"}

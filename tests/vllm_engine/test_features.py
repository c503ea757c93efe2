"""vLLM's features beside packed layers: compiled models, adapters, draft models, parts of merged layers, refusals."""

from pathlib import Path

import pytest

import moepack
from moepack import LoadError
from packed_support import manifest_of
from vllm_support import PROMPTS, answers, assert_agrees, engine, packed_names, vllm


@pytest.fixture(scope="module")
def directory(mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral whose queries, keys and values have different formats; keys are not packed."""
    out = tmp_path_factory.mktemp("features") / "packed"
    moepack.compress(mixtral, out, method="finequant", bits="k_proj=16,v_proj=4", group_size=16, dense_bits=8)
    return out


def test_parts_of_merged_layers_may_have_any_format(directory: Path) -> None:
    records = manifest_of(directory).tensors
    kinds = {name.split(".")[-2]: record.kind for name, record in records.items() if "self_attn" in name}
    assert (kinds["k_proj"], kinds["q_proj"]) == ("dense", "groupwise")
    with engine(directory, load_format="moepack") as running:
        assert packed_names(running) == manifest_of(directory).packed().keys()
        assert_agrees(running, answers(directory))


def test_compiled_models_give_the_same_answers(directory: Path) -> None:
    with engine(directory, load_format="moepack", enforce_eager=False) as running:
        assert_agrees(running, answers(directory))


def test_adapters_are_placed_on_packed_linear_layers(directory: Path) -> None:
    with engine(directory, load_format="moepack", enable_lora=True, max_lora_rank=8) as running:
        assert_agrees(running, answers(directory))


def test_adapters_of_experts_are_refused_by_name(directory: Path) -> None:
    with (
        pytest.raises(LoadError, match=r"leave \['experts'\] out of --lora-target-modules"),
        engine(directory, load_format="moepack", enable_lora=True, lora_target_modules=["q_proj", "experts"]),
    ):
        pass


def test_a_plain_draft_model_is_loaded_as_what_it_is(directory: Path, mixtral: Path) -> None:
    draft = {"model": str(mixtral), "num_speculative_tokens": 2, "method": "draft_model"}
    with engine(directory, load_format="moepack", speculative_config=draft) as running:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        sampling = vllm.SamplingParams(max_tokens=4, temperature=0, detokenize=False)
        assert len(running.generate(prompts, sampling, use_tqdm=False)) == len(PROMPTS)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"data_parallel_size": 2}, "leave --data-parallel-size at 1"),
        ({"cpu_offload_gb": 4.0}, "leave out --cpu-offload-gb"),
    ],
)
def test_settings_that_packed_tensors_do_not_support_are_refused(
    directory: Path, settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(LoadError, match=reason):
        vllm.EngineArgs(model=str(directory), load_format="moepack", **settings).create_engine_config()

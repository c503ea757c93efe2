"""LoRA adapters of a served model: each sequence gets the text of its own adapter, whoever else is answered."""

import copy
import http.client
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tiny_models
from adapter_support import expert_parameters, fresh, randomized
from moepack.cli import app
from moepack.errors import LoadError, UnsupportedModelError
from moepack.integrations.loading import open_tokenizer
from moepack.serving.adapters import Adapters
from moepack.serving.engine import Engine
from moepack.serving.sequence import Wanted
from moepack.serving.step import Part, Stepper
from moepack.serving.text.sampling import Sampling

peft = pytest.importorskip("peft", reason="the extra `train` is not installed")

PROMPTS = (tuple(range(30, 60)), (31,))
"""Token ids; the first prompt is long enough for its keys and values to be kept."""
NAMES = (None, "linear", "experts.v1")
"""The model itself, an adapter of linear layers, and one of experts and attention whose name has a dot."""
TOKENS = 8


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_tokenizer(tiny_models.build("mixtral", tmp_path_factory.mktemp("tokenizer") / "model"))


def saved(architecture: str, directory: Path) -> dict[str, Path]:
    """Adapters of a model, trained on the unpacked weights."""
    _, stock = fresh(architecture)
    attention = ["q_proj", "o_proj"]
    configs = {
        "linear": peft.LoraConfig(target_modules=attention, r=4),
        "experts.v1": peft.LoraConfig(target_modules=attention[:1], target_parameters=expert_parameters(stock), r=2),
    }
    for seed, (name, config) in enumerate(configs.items()):
        model = peft.get_peft_model(copy.deepcopy(stock), config)
        with torch.no_grad():
            for value in (value for path, value in randomized(model, seed).named_parameters() if "lora_" in path):
                value.mul_(3)  # so that texts differ
        model.save_pretrained(directory / name)
    return {name: directory / name for name in configs}


def alone(architecture: str, directories: dict[str, Path], tokenizer: Any) -> dict[tuple[str | None, Any], str]:
    """The texts of each adapter in a model of its own."""
    found = {}
    for name in NAMES:
        model, _ = fresh(architecture)
        if name is not None:
            peft.PeftModel.from_pretrained(model, str(directories[name])).eval()
        engine = Engine(model, tokenizer, slots=1).start()
        for prompt in PROMPTS:
            found[name, prompt] = text(ask(engine, None, prompt))
        engine.close()
    return found


def ask(engine: Engine, name: str | None, prompt: tuple[int, ...]) -> tuple[threading.Event, list[Any]]:
    pieces: list[Any] = []
    ended = threading.Event()

    def receive(piece: Any) -> None:
        pieces.append(piece)
        if piece.finish is not None:
            ended.set()

    sampling = Sampling(max_new_tokens=TOKENS)
    engine.submit(list(prompt), sampling, receive, Wanted(adapter=name))
    return ended, pieces


def text(asked: tuple[threading.Event, list[Any]]) -> str:
    ended, pieces = asked
    assert ended.wait(60) and not pieces[-1].error, pieces
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "deepseek_v2"])
def test_every_sequence_gets_its_own_adapter(architecture: str, tokenizer: Any, tmp_path: Path) -> None:
    directories = saved(architecture, tmp_path)
    expected = alone(architecture, directories, tokenizer)
    assert len({expected[name, PROMPTS[0]] for name in NAMES}) == len(NAMES)
    model, _ = fresh(architecture)
    engine = Engine(model, tokenizer, slots=4, adapters=Adapters(model, directories)).start()
    try:
        for _ in range(2):  # the second time, keys and values of the first are kept
            asked = {(name, prompt): ask(engine, name, prompt) for prompt in PROMPTS for name in NAMES}
            assert {key: text(one) for key, one in asked.items()} == expected
    finally:
        engine.close()


ORDER = ("linear", None, "experts.v1", None, "linear")


def outcomes(stepper: Stepper, model: Any, ids: list[int]) -> list[Any]:
    from moepack.decoding.prefix import new_cache

    with torch.inference_mode():
        return stepper.forward([Part(ids, 0, new_cache(model), adapter=name) for name in ORDER])


def check(architecture: str, directories: dict[str, Path], rows: list[Any], ids: list[int]) -> None:
    """Compare logits with those of models that have one adapter only."""
    for name, row in zip(ORDER, rows, strict=True):
        other, _ = fresh(architecture)
        if name is not None:
            peft.PeftModel.from_pretrained(other, str(directories[name])).eval()
        assert isinstance(row, torch.Tensor), row
        torch.testing.assert_close(row.flatten(), other(torch.tensor([ids])).logits[0, -1], rtol=1e-3, atol=1e-3)


def passes(model: Any) -> list[int]:
    """A list that grows by the tokens of each pass."""
    counts: list[int] = []
    model.register_forward_pre_hook(
        lambda module, inputs, named: counts.append(named["input_ids"].numel()), with_kwargs=True
    )
    return counts


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_one_pass_reads_parts_of_different_adapters(architecture: str, tmp_path: Path) -> None:
    directories = saved(architecture, tmp_path)
    model, _ = fresh(architecture)
    stepper = Stepper(model, adapters=Adapters(model, directories))
    counts = passes(model)
    ids = list(PROMPTS[0])
    check(architecture, directories, outcomes(stepper, model, ids), ids)
    assert counts == [len(ids) * len(ORDER)]


def test_a_layer_that_cannot_share_a_pass_has_one_for_each_adapter(tmp_path: Path) -> None:
    """DoRA needs the weights of each token's adapter."""
    directories = saved("mixtral", tmp_path)
    _, stock = fresh("mixtral")
    directories["linear"] = tmp_path / "dora"
    config = peft.LoraConfig(target_modules=["q_proj"], r=4, use_dora=True)
    randomized(peft.get_peft_model(stock, config), 5).save_pretrained(directories["linear"])
    model, _ = fresh("mixtral")
    adapters = Adapters(model, directories)
    assert not adapters.can_mix
    ids = list(PROMPTS[0])
    counts = passes(model)
    check("mixtral", directories, outcomes(Stepper(model, adapters=adapters), model, ids), ids)
    assert sorted(counts[-3:]) == [len(ids), 2 * len(ids), 2 * len(ids)]


def test_a_layer_that_reads_other_rows_ends_shared_passes(tmp_path: Path) -> None:
    """For example one expert of a layer that is a module of its own: it reads only the tokens that chose it."""
    directories = saved("mixtral", tmp_path)
    model, _ = fresh("mixtral")
    adapters = Adapters(model, directories)
    layer = model.model.layers[1].self_attn.o_proj
    stepper = Stepper(model, adapters=adapters)
    hook = layer.register_forward_pre_hook(lambda module, inputs: inputs[0][:, :7] if adapters.can_mix else None)
    ids = list(PROMPTS[0])
    rows = outcomes(stepper, model, ids)
    hook.remove()
    assert not adapters.can_mix
    check("mixtral", directories, rows, ids)


def test_requests_choose_an_adapter_as_their_model(tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    from moepack.serving.http.server import Settings, create_app
    from serving_support import running

    directories = saved("mixtral", tmp_path)
    expected = alone("mixtral", directories, tokenizer)
    model, _ = fresh("mixtral")
    engine = Engine(model, tokenizer, adapters=Adapters(model, directories))
    with running(create_app(engine, Settings("tiny"))) as port:

        def send(method: str, path: str, body: Any = None) -> Any:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
            return json.load(connection.getresponse())

        models = send("GET", "/v1/models")["data"]
        assert [(model["id"], model["parent"]) for model in models] == [
            ("tiny", None), ("linear", "tiny"), ("experts.v1", "tiny"),
        ]  # fmt: skip
        for name in NAMES:
            body = {"model": name or "tiny", "prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0}
            found = send("POST", "/v1/completions", body)
            assert (found["model"], found["choices"][0]["text"]) == (name or "tiny", expected[name, PROMPTS[0]])
        texts = {str(send("POST", "/v1/embeddings", {"model": name or "tiny", "input": PROMPTS[0]})) for name in NAMES}
        assert len(texts) == len(NAMES)
        unknown = send("POST", "/v1/completions", {"model": "other", "prompt": [31]})
        assert unknown["error"]["message"] == "there is no model 'other', only 'tiny' and 'linear' and 'experts.v1'"
    with pytest.raises(ValueError, match="'linear' is the name of the model"):
        create_app(engine, Settings("linear"))


def test_adapters_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model, _ = fresh("mixtral")
    with pytest.raises(LoadError, match=r"none: there is no adapter_config.json"):
        Adapters(model, {"a": tmp_path / "none"})
    peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]).save_pretrained(tmp_path / "ia3")
    with pytest.raises(LoadError, match="only LoRA adapters can be served, but this is IA3"):
        Adapters(model, {"a": tmp_path / "ia3"})
    other = tmp_path / "other"
    peft.get_peft_model(fresh("mixtral")[1], peft.LoraConfig(target_modules=["o_proj"])).save_pretrained(other)
    weights = other / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(LoadError, match="other: the adapter does not fit the model"):
        Adapters(model, {"a": other})


def test_adapters_that_changed_their_weights_are_refused(tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights="olora")
    peft.get_peft_model(fresh("mixtral")[1], config).save_pretrained(tmp_path / "olora")
    with pytest.raises(UnsupportedModelError, match="init_lora_weights='olora' changed the weights"):
        Adapters(fresh("mixtral")[0], {"mine": tmp_path / "olora"})


def test_an_adapter_without_weights_for_its_targets_is_refused(tmp_path: Path) -> None:
    _, stock = fresh("mixtral")
    peft.get_peft_model(stock, peft.LoraConfig(target_modules=["o_proj"])).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["o_proj", "q_proj"]}))
    with pytest.raises(LoadError, match="Found missing adapter keys"):
        Adapters(fresh("mixtral")[0], {"a": tmp_path})


@pytest.mark.parametrize(
    ("given", "said"),
    [(["a"], "must be NAME=DIR, not 'a'"), (["=x"], "must be NAME=DIR"), (["a=x", "a=y"], "the name 'a' twice")],
)
def test_wrong_usage(packed: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], said: str) -> None:
    monkeypatch.setattr("moepack.cli.evaluate.quiet_transformers", lambda: None)
    options = [part for one in given for part in ("--lora", one)]
    result = CliRunner().invoke(app, ["serve", str(packed), *options])
    assert result.exit_code == 2 and said in result.stderr

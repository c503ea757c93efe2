"""Non-finite logits raise an error at every entry point that names the layer and suggests a fix."""

import math
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from moepack.calibration import decoder_samples
from moepack.calibration.fisher import fisher
from moepack.checkpoint import Checkpoint, describe
from moepack.cli import main
from moepack.decoding.finite import are_finite, non_finite, watching
from moepack.errors import NonFiniteError
from moepack.evaluation import evaluate, record_reference
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.methods.rate.importance import find_balances
from moepack.serving.engine import Engine
from moepack.serving.text.conversation import Conversation
from moepack.serving.text.generation import generate
from moepack.serving.text.sampling import Sampler, Sampling
from runtime_support import ARCHITECTURES, SWITCH, inputs, tiny_model

INF, NAN = math.inf, math.nan
CHARS = 1600


@pytest.mark.parametrize(
    ("row", "sound"),
    [
        ([1.0, 2.0], True),
        ([-INF, 2.0], True),
        ([-INF, -INF], False),
        ([NAN, 2.0], False),
        ([2.0, NAN], False),
        ([INF, 2.0], False),
        ([-INF, NAN], False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_row_is_sound_while_a_token_can_be_chosen(row, sound, dtype):
    assert are_finite(torch.tensor(row, dtype=dtype)) is sound
    assert are_finite(torch.tensor([[[0.0, 1.0], row]], dtype=dtype)) is sound
    for temperature in (0.0, 0.7):
        sampler = Sampler(Sampling(temperature=temperature))
        if sound:
            assert sampler.choose(torch.tensor(row, dtype=dtype), [0]) in (0, 1)
        else:
            with pytest.raises(NonFiniteError):
                sampler.choose(torch.tensor(row, dtype=dtype), [0])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("value", [NAN, INF])
def test_the_first_layer_is_named(architecture, value):
    """The module of the damaged weight is named, or its parent if the weight is a direct parameter."""
    model = tiny_model(architecture)
    given = inputs(model, tokens=6)
    assert "the layer cannot be identified" in str(non_finite(model, given))
    for path, module in list(model.named_modules()):
        own = [p for name, p in module.named_parameters(recurse=False) if "bias" not in name]
        if not own or "relative_attention" in path:
            continue
        kept = own[0].detach().clone()
        called = []
        hook = module.register_forward_hook(lambda *_, called=called: called.append(True))
        with torch.no_grad():
            own[0].fill_(value)
        output = model(**given).logits
        hook.remove()
        if not are_finite(output):
            modules = model.named_modules(remove_duplicate=False)
            owners = [name for name, other in modules if any(own[0] is part for part in other._parameters.values())]
            if not called:  # its parent multiplies by the weight
                owners.append(path.rpartition(".")[0])
            said = str(non_finite(model, given))
            assert any(f"first appears in '{name}'" in said for name in owners), (owners, said)
        with torch.no_grad():
            own[0].copy_(kept)
    assert not any(module._forward_hooks for module in model.modules())
    assert are_finite(model(**given).logits)


def test_an_overflow_between_modules_is_named_by_the_one_around_it():
    model = tiny_model("mixtral").half()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.fill_(1e3)
        model.model.layers[1].self_attn.v_proj.weight.fill_(10.0)
        model.model.embed_tokens.weight.fill_(6e4)  # finite, and so is what attention adds, but not their sum
    said = str(non_finite(model, inputs(model, tokens=4)))
    assert "first appears in 'model.layers." in said and "float16 ends at 65504: try --dtype bfloat16" in said


@pytest.mark.parametrize(("dtype", "advice"), [("bfloat16", "--dtype float32"), ("float32", "moepack verify")])
def test_the_advice_depends_on_the_dtype(dtype, advice):
    model = tiny_model("mixtral").to(getattr(torch, dtype))
    with torch.no_grad():
        model.model.norm.weight.fill_(NAN)
    assert advice in str(non_finite(model, inputs(model, tokens=4)))


def test_a_long_text_is_read_again_in_parts(monkeypatch):
    monkeypatch.setattr("moepack.decoding.finite.CHUNK", 4)
    model = tiny_model("mixtral")
    with torch.no_grad():
        model.model.embed_tokens.weight[60] = NAN
    ids, sizes = torch.arange(3, 23)[None], []
    ids[0, 9] = 60
    model.model.embed_tokens.register_forward_pre_hook(lambda _, given: sizes.append(given[0].shape[1]))
    assert "'model.embed_tokens'" in str(non_finite(model, {"input_ids": ids}))
    assert sizes == [4, 4, 4]  # and no further


@pytest.fixture(scope="module")
def broken(packed, tmp_path_factory):
    """A packed model whose embedding is NaN only for the letter q."""
    directory = tmp_path_factory.mktemp("broken") / "packed"
    shutil.copytree(packed, directory)
    token = open_tokenizer(directory)("q").input_ids[0]
    model = open_model(directory, "float32", mode="exact")
    with torch.no_grad():
        weight = model.model.embed_tokens.weight.clone()
        weight[token] = NAN
        model.model.embed_tokens.weight = torch.nn.Parameter(weight)
    return model, open_tokenizer(directory), token


PLACE = "first appears in 'model.embed_tokens'"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_generate_and_chat(broken, temperature):
    model, tokenizer, _ = broken
    assert generate(model, tokenizer, "The sea", Sampling(max_new_tokens=2)).tokens == 2
    sampling = Sampling(temperature=temperature)
    with pytest.raises(NonFiniteError, match=PLACE):
        generate(model, tokenizer, "The queen", sampling)
    with pytest.raises(NonFiniteError, match=PLACE):
        Conversation(model, tokenizer, sampling).answer("The queen", lambda piece: None)


def test_a_step_behind_sound_ones(broken, monkeypatch):
    """The token with the NaN embedding is generated, so that a decoding step of the core or of transformers reads
    it."""
    model, tokenizer, token = broken
    processors = model._get_logits_processor

    def forced(*args, **kwargs):
        found, calls = processors(*args, **kwargs), []

        def choose(ids, scores):
            calls.append(1)
            return scores if len(calls) != 3 else scores.index_fill(1, torch.tensor([token]), 1e9)

        found.append(choose)
        return found

    monkeypatch.setattr(model, "_get_logits_processor", forced)
    pieces = []
    with pytest.raises(NonFiniteError, match=PLACE):
        generate(model, tokenizer, "The sea", Sampling(max_new_tokens=9), on_text=pieces.append)
    assert "".join(pieces).endswith("q")


def test_an_encoder_decoder():
    model = tiny_model(SWITCH)
    with torch.no_grad():
        model.decoder.final_layer_norm.weight.fill_(NAN)

    def tokenizer(text):
        return SimpleNamespace(input_ids=[5, 6, 7, 2])

    tokenizer.eos_token_id = tokenizer.pad_token_id = tokenizer.bos_token_id = None
    tokenizer.decode = lambda ids, **_: "x" * len(ids)
    with pytest.raises(NonFiniteError, match=r"first appears in 'decoder\.final_layer_norm'"):
        generate(model, tokenizer, "text", Sampling(max_new_tokens=2))


@pytest.mark.parametrize("together", [True, False])
def test_a_served_sequence_ends_alone(broken, together):
    model, tokenizer, _ = broken
    texts = ["The sea", "The queen", "a wolf", "x"]
    sampling = Sampling(max_new_tokens=8)
    expected = [None if "q" in text else generate(model, tokenizer, text, sampling).text for text in texts]
    engine = Engine(model, tokenizer)
    engine._stepper.pace.note(False, 1, 1e9 if together else 0.0)
    pieces, ended = [[] for _ in texts], threading.Semaphore(0)

    def collector(number):
        return lambda piece: (pieces[number].append(piece), piece.finish and ended.release())

    for number, text in enumerate(texts):
        engine.submit(tokenizer(text).input_ids, sampling, collector(number))
    engine.start()
    for _ in texts:
        assert ended.acquire(timeout=60)
    for found, wanted in zip(pieces, expected, strict=True):
        if wanted is None:
            assert found[-1].finish == "error" and PLACE in found[-1].error and "verify" in found[-1].error
        else:
            assert "".join(piece.text for piece in found) == wanted
    assert engine.is_open
    engine.close()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the sea, the wolf and the fire said nothing at all,\n" * 60)
    return file


@pytest.fixture(scope="module")
def damaged(mixtral, tmp_path_factory):
    """A checkpoint with a NaN norm after the last block."""
    directory = tmp_path_factory.mktemp("damaged") / "source"
    shutil.copytree(mixtral, directory)
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"].fill_(NAN)
    save_file(tensors, file, {"format": "pt"})
    return directory


def test_evaluation_and_references(damaged, mixtral, packed, text):
    for call in (
        lambda: evaluate(damaged, text, CHARS),
        lambda: evaluate(packed, text, CHARS, damaged),
        lambda: record_reference(damaged, text, CHARS),
    ):
        with pytest.raises(NonFiniteError, match=r"first appears in 'model\.norm'"):
            call()
    with pytest.raises(NonFiniteError, match="behind the last block"):
        record_reference(damaged, text, CHARS, memory=0)


def test_commands_say_it_in_a_line(damaged, text, capsys):
    for command in (
        ["generate", "--prompt", "hi"],
        ["generate", "--prompt", "hi", "--temperature", "1"],
        ["eval", "--text", text],
    ):
        with pytest.raises(SystemExit) as end:
            main([command[0], str(damaged), *map(str, command[1:])])
        said = capsys.readouterr().err
        assert end.value.code == 1 and "error: the model's logits are not finite" in said and "Traceback" not in said


def test_the_search_for_importance(damaged):
    checkpoint = Checkpoint.open(damaged)
    with pytest.raises(NonFiniteError, match=r"'model\.norm'"):
        model, samples = describe(checkpoint), decoder_samples(torch.arange(3, 19)[None])
        fisher(checkpoint, model, find_balances(model), samples, torch.device("cpu"))


def test_every_call_of_a_model_that_is_watched(broken):
    model, _, token = broken
    with watching(model):
        assert are_finite(model(torch.tensor([[4, 5]])).logits)
        with pytest.raises(NonFiniteError, match=PLACE):
            model(torch.tensor([[5, token, 6]]))
    model(torch.tensor([[5, token, 6]]))


def test_outputs_of_padding_are_ignored():
    model = tiny_model("mixtral")
    model.lm_head.register_forward_hook(lambda _, given, logits: logits.index_fill(1, torch.tensor([2]), NAN))
    ids = torch.tensor([[5, 6, 7]])
    with watching(model):
        model(ids, attention_mask=torch.tensor([[1, 1, 0]]))
        with pytest.raises(NonFiniteError, match="'lm_head'"):
            model(ids, attention_mask=torch.ones_like(ids))


def test_a_masked_vocabulary_is_sound(packed, text):
    """A model that excludes tokens absent from all texts: its loss, its divergence from another such model, its
    answers."""
    model, tokenizer = open_model(packed, "float32", mode="exact"), open_tokenizer(packed)
    plain = evaluate(model, text, CHARS, tokenizer=tokenizer)
    hook = model.lm_head.register_forward_hook(
        lambda _, given, logits: logits.index_fill(-1, torch.tensor([0, 9]), -INF)
    )
    masked = evaluate(model, text, CHARS, model, tokenizer=tokenizer)
    assert masked.loss <= plain.loss and masked.kl == pytest.approx(0, abs=1e-6)
    assert generate(model, tokenizer, "The sea", Sampling(max_new_tokens=3, temperature=1.0)).tokens == 3
    hook.remove()
    letter = tokenizer("w").input_ids[0]
    model.lm_head.register_forward_hook(lambda _, given, logits: logits.index_fill(-1, torch.tensor([letter]), -INF))
    with pytest.raises(NonFiniteError, match=f"gives probability zero to token {letter}, which is in the text"):
        evaluate(model, text, CHARS, tokenizer=tokenizer)

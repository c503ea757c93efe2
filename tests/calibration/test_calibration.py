import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GraniteMoeConfig, GraniteMoeForCausalLM

import tiny_models
from moepack.calibration import (
    CalibrationSettings,
    Calibrator,
    SpanTokens,
    Stage,
    Weights,
    decoder_samples,
    seq2seq_samples,
)
from moepack.calibration.activations import Activations
from moepack.calibration.stacks import Stack
from moepack.checkpoint import Checkpoint, describe
from moepack.errors import CalibrationError, DeviceMemoryError, DiskError, InvalidTensorError

SPECIAL = SpanTokens(sentinels=tuple(18 - i for i in range(16)), end=1, start=0)
WINDOWS = torch.randint(19, tiny_models.VOCABULARY, (5, 40), generator=torch.Generator().manual_seed(0))


def keep(stage):
    return dict(stage.weights)


def samples_for(architecture):
    return seq2seq_samples(WINDOWS, SPECIAL) if architecture == "switch_transformers" else decoder_samples(WINDOWS)


def calibrator(path, samples, **settings):
    checkpoint = Checkpoint.open(path)
    return Calibrator(checkpoint, describe(checkpoint), samples, CalibrationSettings(**settings))


def solved(calibrator, solve):
    """The layers of a model, each after `solve` has answered all its stages."""
    for run in calibrator.layers():
        for stage in run:
            with run.smaller_groups():
                run.answer(solve(stage))
        yield run


def final_states(calibrator, solve=keep):
    """The hidden states after the last block of the streams, with the tokens of each layer's experts."""
    streams = []
    make = calibrator._stream
    calibrator._stream = lambda *args: streams.append(make(*args)) or streams[-1]
    tokens = [run.tokens for run in solved(calibrator, solve)]
    number = calibrator._streams()
    return [stream.hidden.tokens for stream in streams[-number:]], tokens


def reference(path, samples):
    """Hidden states of transformers' own forward, before the last norm, and the experts that its routers choose."""
    seq2seq = samples.targets is not None
    auto = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=torch.float32).eval()
    norm = model.decoder.final_layer_norm if seq2seq else model.model.norm
    seen = []
    norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.inference_mode():
        if seq2seq:
            model(input_ids=samples.inputs, decoder_input_ids=samples.targets)
        else:
            model(input_ids=samples.inputs)
    return seen[-1].flatten(0, 1)


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
@pytest.mark.parametrize("group, batch, cap", [(16, 8, 4.0), (3, 2, 0.3)])
def test_untouched_weights_give_the_states_of_the_model(tiny_checkpoint, architecture, group, batch, cap):
    path, samples = tiny_checkpoint(architecture), samples_for(architecture)
    states, _ = final_states(calibrator(path, samples, group=group, batch=batch, token_cap=cap))
    expected = reference(path, samples)
    for stream in states:
        torch.testing.assert_close(stream, expected, rtol=1e-4, atol=1e-4)


def test_hessians_are_the_gram_matrices_of_each_experts_tokens(mixtral):
    samples = decoder_samples(WINDOWS)
    model = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32).eval()
    calls = []
    model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda module, args: calls.append(args))
    with torch.inference_mode():
        model(input_ids=samples.inputs)
    hidden, index, _ = calls[0]
    gate_up = model.model.layers[1].mlp.experts.gate_up_proj

    def solve(stage):
        if stage.layer == "model.layers.1.mlp.experts":
            for position, expert in enumerate(stage.experts):
                x = hidden[(index == expert).any(-1)]
                assert int(stage.inputs.tokens[position]) == len(x)
                if "down_proj" in stage.weights:
                    gate, up = (x @ gate_up[expert].T).chunk(2, dim=-1)
                    x = torch.nn.functional.silu(gate) * up
                torch.testing.assert_close(stage.hessians()[position], (x.T @ x).detach(), rtol=1e-3, atol=1e-3)
                torch.testing.assert_close(sum(len(piece) for piece in stage.inputs.pieces(position)), len(x))
        return keep(stage)

    runs = [*solved(calibrator(mixtral, samples, group=3, token_cap=0.4), solve)]
    assert [run.layer.name for run in runs] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert torch.equal(runs[1].tokens, torch.bincount(index.flatten(), minlength=4))


def halve(stage):
    return {name: weights * 0.5 for name, weights in stage.weights.items()}


def test_compressed_experts_feed_the_compressed_stream_only(mixtral):
    samples = decoder_samples(WINDOWS)
    expected = reference(mixtral, samples)
    (compressed, original), _ = final_states(calibrator(mixtral, samples), halve)
    torch.testing.assert_close(original, expected, rtol=1e-4, atol=1e-4)
    assert (compressed - expected).abs().max() > 2e-3
    (alone,), tokens = final_states(calibrator(mixtral, samples, activations="original"), halve)
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-4)
    _, again = final_states(calibrator(mixtral, samples, activations="original", routing="compressed"), halve)
    assert all(torch.equal(a, b) for a, b in zip(tokens, again, strict=True))
    (single,), _ = final_states(calibrator(mixtral, samples, routing="compressed"), halve)
    torch.testing.assert_close(single, compressed)


def test_the_drift_is_known_whichever_routing_is_used(mixtral):
    samples, counts = decoder_samples(WINDOWS), {}
    _, original = final_states(calibrator(mixtral, samples, activations="original"))
    for options, drifts in (({}, False), ({"drift": True}, True), ({"routing": "original"}, True)):
        seen = []

        def watch(stage, seen=seen):
            if "down_proj" not in stage.weights:
                seen.append((stage.layer, stage.inputs.tokens, bool(stage.moments().drift.abs().max() > 0)))
            return halve(stage)

        _, tokens = final_states(calibrator(mixtral, samples, **{"routing": "compressed", **options}), watch)
        first = seen[0][0]
        assert not seen[0][2] and all(drifted == drifts for layer, _, drifted in seen if layer != first)
        assert all(torch.equal(a, b) for (_, a, _), b in zip(seen, tokens, strict=True))
        # Tokens are those of the respective router, with and without the other model.
        expected = original if "routing" in options else counts.setdefault("compressed", tokens)
        assert all(torch.equal(a, b) for a, b in zip(tokens, expected, strict=True))


def test_a_replay_gives_the_same_bits(mixtral):
    samples = decoder_samples(WINDOWS)
    first, _ = final_states(calibrator(mixtral, samples), halve)
    again, _ = final_states(calibrator(mixtral, samples), halve)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_buffers_may_lie_in_files(mixtral, tmp_path):
    samples = decoder_samples(WINDOWS)
    memory, _ = final_states(calibrator(mixtral, samples))
    mapped, _ = final_states(calibrator(mixtral, samples, buffer_directory=tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(memory, mapped, strict=True))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "model.hidden.0", "model.hidden.1", "model.inputs.0", "model.inputs.1",
    ]  # fmt: skip
    with pytest.raises(DiskError, match="cannot map"):
        next(calibrator(mixtral, samples, buffer_directory=tmp_path / "none").layers())


def test_premasked_positions_are_left_out_of_hessians(switch):
    masked = calibrator(switch, seq2seq_samples(WINDOWS, SPECIAL))
    everything = calibrator(switch, seq2seq_samples(WINDOWS, SPECIAL, premask=False))
    counts = [int(run.tokens.sum()) for run in solved(masked, keep)]
    full = [int(run.tokens.sum()) for run in solved(everything, keep)]
    assert full == [5 * (40 - 6 + 2 + 1), 5 * (6 + 2 + 1)]
    assert counts == [5 * (40 - 6 + 1), 5 * (6 + 1)]


def test_smaller_groups_are_tried_when_memory_runs_out(mixtral):
    samples, seen = decoder_samples(WINDOWS), []

    def solve(stage):
        if len(stage.experts) > 1:
            raise torch.OutOfMemoryError
        seen.append(stage.experts[0])
        return keep(stage)

    states, _ = final_states(calibrator(mixtral, samples), solve)
    torch.testing.assert_close(states[0], reference(mixtral, samples), rtol=1e-4, atol=1e-4)
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3] * 2

    def never(stage):
        raise torch.OutOfMemoryError

    with pytest.raises(DeviceMemoryError, match=r"one expert of 'model\.layers\.0"):
        list(solved(calibrator(mixtral, samples), never))


def test_a_layer_must_be_answered_to_its_end(mixtral):
    calibrate = calibrator(mixtral, decoder_samples(WINDOWS))
    with pytest.raises(RuntimeError, match=r"not iterated to its last stage"):
        for run in calibrate.layers():
            next(iter(run))
    with pytest.raises(RuntimeError, match=r"a stage of 'model\.layers\.0\.mlp\.experts' was not answered"):
        list(next(calibrate.layers()))


def test_a_device_too_small_for_a_block_is_a_typed_error(mixtral, monkeypatch):
    def full(self, *arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Stack, "run", full)
    with pytest.raises(DeviceMemoryError, match=r"too little memory for 'model\.layers\.0' and 8 samples"):
        list(solved(calibrator(mixtral, decoder_samples(WINDOWS)), keep))


def broken(mixtral, tmp_path, name, value):
    path = tmp_path / "broken"
    shutil.copytree(mixtral, path)
    tensors = load_file(path / "model.safetensors")
    tensors[name].view(-1)[0] = value
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_a_model_that_computes_nan_is_a_typed_error(mixtral, tmp_path):
    path = broken(mixtral, tmp_path, "model.layers.1.self_attn.o_proj.weight", float("nan"))
    with pytest.raises(CalibrationError, match=r"NaN or infinity in 'model\.layers\.1'"):
        list(solved(calibrator(path, decoder_samples(WINDOWS)), keep))


def test_experts_that_compute_infinity_are_a_typed_error(mixtral, tmp_path):
    def explode(stage):
        return {name: weights * 1e38 for name, weights in stage.weights.items()}

    with pytest.raises(CalibrationError, match=r"expert \d of 'model\.layers\.0\.mlp\.experts' computes"):
        list(solved(calibrator(mixtral, decoder_samples(WINDOWS)), explode))


def test_samples_of_the_wrong_kind_are_refused(mixtral, switch):
    with pytest.raises(CalibrationError, match="encoder-decoder"):
        calibrator(mixtral, seq2seq_samples(WINDOWS, SPECIAL))
    with pytest.raises(CalibrationError, match="encoder-decoder"):
        calibrator(switch, decoder_samples(WINDOWS))


def test_granite_scales_the_output_of_its_experts(tmp_path):
    torch.manual_seed(0)
    config = GraniteMoeConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, residual_multiplier=0.22,
        embedding_multiplier=6.0, attention_multiplier=0.2, logits_scaling=3.0,
    )  # fmt: skip
    GraniteMoeForCausalLM(config).save_pretrained(tmp_path)
    samples = decoder_samples(WINDOWS)
    run = calibrator(tmp_path, samples)
    states, _ = final_states(run)
    torch.testing.assert_close(states[0], reference(tmp_path, samples), rtol=1e-4, atol=1e-4)
    assert run._factors["model"] == pytest.approx(0.22, abs=1e-5)


def test_passes_for_linear_layers_end_at_the_layer(mixtral, monkeypatch):
    """The Hessians are those of the whole forward pass, and nothing behind the layers runs for them."""
    samples = decoder_samples(WINDOWS)
    model = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32).eval()
    names = [f"model.layers.1.self_attn.{name}_proj" for name in "qo"]
    inputs = {}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0]}))
    with torch.inference_mode():
        model(input_ids=samples.inputs)
    runs = calibrator(mixtral, samples)
    dense = {layer.name: layer for layer in describe(Checkpoint.open(mixtral)).dense if "layers" in layer.name}
    finished, seen = [], []
    run = Stack.run
    monkeypatch.setattr(Stack, "run", lambda *args, **more: finished.append(run(*args, **more)) or finished[-1])
    for layer in runs.layers(dense):
        for stage in layer:
            for name in stage.weights.keys() & inputs.keys():
                before, x = len(finished), inputs[name].flatten(0, 1)
                torch.testing.assert_close(stage.hessians()[0], x.T @ x, rtol=1e-3, atol=1e-3)
                moments = stage.moments(drift=False)
                assert torch.equal(moments.hessians, stage.hessians()) and moments.drift is None
                assert len(finished) == before
                seen.append(name)
            layer.answer(keep(stage))
    assert sorted(seen) == sorted(names)


def test_outputs_are_the_same_if_no_activations_are_kept(mixtral, monkeypatch):
    """Also where the routers of the two models choose different experts."""

    def solve(stage):
        stage.moments()
        return {name: weights + 0.05 * weights.std() for name, weights in stage.weights.items()}

    samples = decoder_samples(WINDOWS)
    kept, tokens = final_states(calibrator(mixtral, samples, token_cap=0.4), solve)
    monkeypatch.setattr(Activations, "keep", lambda *_: None)
    anew, again = final_states(calibrator(mixtral, samples, token_cap=0.4), solve)
    assert all(torch.equal(one, other) for one, other in zip(tokens, again, strict=True))
    for one, other in zip(kept, anew, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_stage_names_the_first_expert_that_is_not_finite(value):
    given = {"up": torch.ones(3, 4, 8), "down": torch.ones(3, 8, 4)}
    tensors = {
        name: Weights(name, (9, *own.shape[1:]), own.__getitem__, tuple(f"{name}.{expert}" for expert in range(9)))
        for name, own in given.items()
    }
    stage = Stage("layer", tensors, range(5, 8), given)
    assert stage.finite() is stage
    given["down"][1, 2, 3] = given["down"][2, 0, 0] = value
    with pytest.raises(InvalidTensorError, match="expert 6 holds NaN or infinite") as caught:
        stage.finite()
    assert caught.value.tensor == "down.6"

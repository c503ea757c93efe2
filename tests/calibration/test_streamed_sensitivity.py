"""Sensitivity measured block by block equals that of the whole model and needs the memory of one block."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import MixtralModel

import moepack
import tiny_models
from census_support import skip_unknown
from command_support import run
from moepack.calibration import CalibrationRequest, CalibrationSettings, factored
from moepack.calibration import fisher as streamed
from moepack.calibration.backward import draw_tokens
from moepack.calibration.factored import Gradients
from moepack.calibration.fisher import (
    LENGTH,
    ROUND,
    WINDOWS,
    Sensitivity,
    _Squares,
    fisher,
    needed_bytes,
    owners,
    pieces,
)
from moepack.calibration.samples import Samples, decoder_samples
from moepack.calibration.skeleton import Skeleton
from moepack.calibration.squares import Sums
from moepack.calibration.text import BUILT_IN
from moepack.census.tiny import tiny_model
from moepack.checkpoint import Checkpoint, describe
from moepack.checkpoint.classes import meta_model
from moepack.checkpoint.quantized import open_checkpoint
from moepack.errors import UnsupportedModelError
from moepack.evaluation.streaming import StreamedDecoder
from moepack.integrations.loading import open_model
from moepack.methods import Auto, Rate
from moepack.methods.rate.importance import find_balances, find_importance
from moepack.pipeline.estimate import estimate
from places import TINY_MOE

CPU = torch.device("cpu")
IDS = torch.randint(3, 60, (3, 16), generator=torch.Generator().manual_seed(1))

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("mixtral", {"tie_word_embeddings": True}),
    "not tied": ("mixtral", {"tie_word_embeddings": False}),
    "tied, norms of queries": ("qwen3_moe", {"tie_word_embeddings": True}),
    "latents, a shared expert, a dense layer": ("deepseek_v3", {}),
    "latents without those of queries": ("deepseek_v2", {}),
    "transposed experts with biases": ("gpt_oss", {}),
    "several residual streams": ("deepseek_v4", {}),
    "inputs of each layer, shared keys and values": ("gemma4", {}),
    "routers that read the router before": ("zaya", {}),
    "a head that reads the embedding again": ("inkling2", {}),
    "scaled logits": ("granitemoe", {}),
    "a classifier of tokens": ("openai_privacy_filter", {}),
    "experts that text does not reach": ("ernie4_5_vl_moe", {}),
}


def saved(model_type: str, path: Path, own: dict[str, Any]) -> Path:
    skip_unknown(model_type)
    tiny_model(model_type, own=own).save_pretrained(path)
    return path


def measured(path: Path, samples: Samples | None = None, progress: Any = None) -> dict[str, Sensitivity]:
    checkpoint = open_checkpoint(path)
    model = describe(checkpoint)
    found = fisher(checkpoint, model, find_balances(model), samples or decoder_samples(IDS), CPU, progress)
    assert found is not None
    return found


def whole_model(path: Path) -> dict[str, Sensitivity]:
    """Compute the sensitivity of the whole model by definition: squared gradients of windows, for balanced weights."""
    checkpoint = open_checkpoint(path)
    described = describe(checkpoint)
    model, balances = open_model(path, torch.float32), find_balances(described)
    held = dict(owners(described, model))
    parameters = {name: own for name, own in model.named_parameters() if name in held}
    sums = {name: torch.zeros_like(own, dtype=torch.float64) for name, own in parameters.items()}
    generator = torch.Generator().manual_seed(0)
    for ids in IDS:
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        drawn = draw_tokens(logits.detach(), generator)
        loss = nn.functional.cross_entropy(logits, drawn, reduction="sum")
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                sums.pop(name, None)
            else:
                sums[name] += gradient.double().square()
    found = {}
    for name, squares in sums.items():
        for packed, view in held[name].items():
            mean, balance = view(squares / IDS.numel()), balances[packed]
            balanced = mean * (balance.rows[..., None] * balance.columns[:, None]).double().square()
            found[packed] = Sensitivity(float(mean.mean()), balanced.mean(2), balanced.mean(1))
    return found


def require_same(found: dict[str, Sensitivity], expected: dict[str, Sensitivity]) -> None:
    assert found.keys() == expected.keys()
    for name, own in expected.items():
        assert found[name].mean == pytest.approx(own.mean, rel=1e-4), name
        for part, whole in ((found[name].rows, own.rows), (found[name].columns, own.columns)):
            torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4 * float(whole.mean()) + 1e-30)


# ---- the numbers


@pytest.mark.parametrize("form", MODELS)
def test_blocks_give_the_numbers_of_the_whole_model(form: str, tmp_path: Path) -> None:
    path = saved(*MODELS[form][:1], tmp_path / "model", MODELS[form][1])
    expected = whole_model(path)
    assert len(expected) > 5
    require_same(measured(path), expected)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "ernie4_5_vl_moe"])
def test_products_in_batches_give_the_same_numbers(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU multiplies the rows of all experts as one batch; both layouts of experts, and experts without any rows."""
    path = saved(model_type, tmp_path / "model", {})
    expected = measured(path)
    rows: list[int] = []

    def are_apart(x: Tensor) -> bool:
        rows.append(len(x))
        return not len(x)

    monkeypatch.setattr(factored, "_are_apart", are_apart)
    require_same(measured(path), expected)
    assert any(rows)


def test_rounds_do_not_change_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved("qwen3_moe", tmp_path / "model", {})
    expected = measured(path)
    monkeypatch.setattr(streamed, "_round_size", lambda *_: 2)
    require_same(measured(path), expected)


@pytest.mark.parametrize(("device", "free", "pieces"), [("cpu", 1 << 40, ROUND), ("cuda", 0, ROUND), ("cuda", 1, 1000)])
def test_a_gpu_reads_more_pieces_at_a_time(
    device: str, free: int, pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as an eighth of the free memory holds; `free` is in 8,000 pieces if it is 1."""
    checkpoint = open_checkpoint(saved("mixtral", tmp_path / "model", {}))
    whole = meta_model(checkpoint.path, checkpoint.config)
    one = 4 * LENGTH * whole.config.hidden_size * (whole.config.num_hidden_layers + 3)
    monkeypatch.setattr(streamed, "available_bytes", lambda: 8000 * one if free == 1 else free)
    assert streamed._round_size(describe(checkpoint), whole, torch.device(device)) == pieces


def test_rows_without_a_matrix_are_zeros_in_a_batch() -> None:
    """As at the end of what transformers sorts by expert; a matrix may have no rows."""
    rows = torch.arange(12.0).view(6, 2)
    places = factored._Places.of(torch.tensor([2, 2, 5], dtype=torch.int32), 6)
    stacked = places.stacked(rows)
    assert stacked.tolist() == [
        [[0, 1], [2, 3], [0, 0]],
        [[0, 0], [0, 0], [0, 0]],
        [[4, 5], [6, 7], [8, 9]],
    ]
    assert torch.equal(places.flat(stacked), rows * torch.tensor([[1.0]] * 5 + [[0.0]]))


@pytest.mark.parametrize("model_type", ["mixtral", "olmoe"])
def test_a_head_that_is_stored_with_other_values_is_not_tied(model_type: str, tmp_path: Path) -> None:
    """Even if config.json ties them, the embedding has its own gradient, as in the model that transformers loads."""
    path = saved(model_type, tmp_path / "model", {"tie_word_embeddings": True})
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    found, expected = measured(path), whole_model(path)
    require_same({name: own for name, own in found.items() if name in expected}, expected)
    assert found["model.embed_tokens.weight"].mean > 0


@pytest.mark.parametrize("form", ["tied", "not tied", "scaled logits"])
def test_rows_of_tokens_have_the_metric_of_what_they_are_multiplied_with(form: str, tmp_path: Path) -> None:
    """Inputs of the head by the squared gradients of logits; gradients of rows, of which every window reads others."""
    path = saved(*MODELS[form][:1], tmp_path / "model", MODELS[form][1])
    ids = torch.stack([torch.randperm(57, generator=torch.Generator().manual_seed(own))[:16] + 3 for own in range(3)])
    found = measured(path, decoder_samples(ids))
    model, generator = open_model(path, torch.float32), torch.Generator().manual_seed(0)
    width = model.config.hidden_size
    expected = {"head": torch.zeros(width, width), "embedding": torch.zeros(width, width)}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    read: list[Tensor] = []
    head.register_forward_pre_hook(lambda _, given: read.append(given[0][0]))
    rows = embedding.weight.detach()[ids].requires_grad_()
    for window, own in zip(ids, rows, strict=True):
        factor = embedding(window[:1])[0] / embedding.weight[window[0]]
        logits = model(inputs_embeds=(own * factor)[None], use_cache=False).logits[0]
        drawn = draw_tokens(logits.detach(), generator)
        loss = nn.functional.cross_entropy(logits, drawn, reduction="sum")
        (outer,) = torch.autograd.grad(loss, [own])
        slopes = (logits.detach().softmax(-1) - nn.functional.one_hot(drawn, logits.shape[1])).norm(dim=-1)
        slopes = slopes * (logits.norm() / (read[-1] @ head.weight.T).norm()).detach()
        expected["head"] += (inner := (read[-1] * slopes[:, None]).detach()).T @ inner / ids.numel()
        expected["embedding"] += outer.T @ outer / ids.numel()
    if form == "tied":
        expected = {"embedding": expected["head"] + expected["embedding"]}
    names = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}
    for role, own in expected.items():
        torch.testing.assert_close(found[names[role]].metric, own, rtol=1e-3, atol=1e-4 * float(own.diagonal().mean()))
    assert all(own.metric is None for name, own in found.items() if "layers" in name)


@pytest.mark.parametrize("model_type", ["gemma4", "inkling2", "zaya", "granitemoe", "deepseek_v4"])
def test_a_streamed_model_predicts_the_same_as_the_whole_one(model_type: str, tmp_path: Path) -> None:
    """The tail of the model also receives inputs other than the outputs of the last block."""
    path = saved(model_type, tmp_path / "model", {})
    streamed = StreamedDecoder(Checkpoint.open(path), IDS, torch.float32, tmp_path)
    found = torch.cat(list(streamed.logits(lambda *_: None)))
    with torch.inference_mode():
        expected = open_model(path, torch.float32)(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_head_that_reads_earlier_blocks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the earlier blocks' outputs, gradients would lack their contribution."""
    path = saved("mixtral", tmp_path / "model", {})
    forward = MixtralModel.forward

    def adds_the_first(self: Any, *given: Any, **named: Any) -> Any:
        seen: list[Tensor] = []
        hook = self.layers[0].register_forward_hook(lambda _, inputs, output: seen.append(output))
        output = forward(self, *given, **named)
        hook.remove()
        output.last_hidden_state = output.last_hidden_state + seen[0]
        return output

    monkeypatch.setattr(MixtralModel, "forward", adds_the_first)
    with pytest.raises(UnsupportedModelError, match="depend on outputs of blocks before the last one"):
        measured(path)


# ---- the text


@pytest.mark.parametrize(
    ("windows", "length", "count", "cut"), [(60, 512, WINDOWS, LENGTH), (5, 40, 5, 40), (3, 300, 3, LENGTH)]
)
def test_windows_are_cut_into_pieces(windows: int, length: int, count: int, cut: int) -> None:
    found = pieces(torch.arange(windows * length).view(windows, length))
    assert found.shape == (count, cut)
    assert bool((found.diff(dim=1) == 1).all()) and bool((found[:, 0].diff() > 0).all())
    assert found[0, 0] == 0 and windows * length - found[-1, -1] <= 1 + length % cut


# ---- memory


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    return saved("qwen3_moe", tmp_path / "model", {"num_hidden_layers": 6, "tie_word_embeddings": False})


def test_one_block_is_in_memory_at_a_time(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight of a block is read twice; those of the first block, embedding and tail at most three times."""
    held: list[int] = []
    blocks_held: list[int] = []
    reads: dict[str, int] = {}
    fetch, tensor = Skeleton._parameter, Checkpoint.tensor

    def watched(self: Skeleton, *given: Any, **named: Any) -> nn.Parameter:
        found = fetch(self, *given, **named)
        loaded = {id(own): own.numel() for own in self.module.parameters() if not own.is_meta}
        held.append(sum(loaded.values()) + found.numel() * (id(found) not in loaded))
        layers = self.module.get_submodule("model.layers")
        blocks_held.append(sum(any(not own.is_meta for own in block.parameters()) for block in layers.children()))
        return found

    def counted(self: Checkpoint, name: str) -> Tensor:
        reads[name] = reads.get(name, 0) + 1
        return tensor(self, name)

    checkpoint = open_checkpoint(deep)
    model = describe(checkpoint)
    balances = find_balances(model)
    monkeypatch.setattr(Skeleton, "_parameter", watched)
    monkeypatch.setattr(Checkpoint, "tensor", counted)
    assert fisher(checkpoint, model, balances, decoder_samples(IDS), CPU)
    whole = meta_model(checkpoint.path, checkpoint.config)
    blocks = [sum(own.numel() for own in block.parameters()) for block in whole.model.layers]
    ends = sum(own.numel() for own in whole.parameters()) - sum(blocks)
    assert max(blocks_held) == 1 and max(held) <= max(blocks) + ends < sum(blocks) / 4
    assert set(reads) == set(checkpoint.names())
    assert all(count == 2 for name, count in reads.items() if ".layers." in name and ".layers.0." not in name)
    assert max(reads.values()) <= 3


def test_gradients_of_one_window_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When autograd completes a gradient, all others have been freed."""
    path = saved(
        "llama4_text", tmp_path / "model", {"num_hidden_layers": 6}
    )  # experts that are multiplied as one batch
    seen: list[int] = []
    register = Tensor.register_post_accumulate_grad_hook
    alive: list[Tensor] = []

    def watched(self: Tensor, hook: Callable[[Tensor], None]) -> Any:
        alive.append(self)

        def counted(found: Tensor) -> None:
            seen.append(sum(each.grad is not None for each in alive))
            hook(found)

        return register(self, counted)

    monkeypatch.setattr(Tensor, "register_post_accumulate_grad_hook", watched)
    assert measured(path)
    assert seen.count(1) >= 6 * len(IDS) and max(seen) == 1


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral"])
def test_products_have_no_gradients_of_their_weights(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers, experts in both layouts and the embedding of a head that is not tied pass on factors alone."""
    path = saved(model_type, tmp_path / "model", {"tie_word_embeddings": False})
    received: set[str] = set()
    monkeypatch.setattr(_Squares, "gradient", lambda self, name, gradient: received.add(name))
    assert measured(path) and not received


def test_products_by_keyword_have_the_same_gradients() -> None:
    """Factors are kept where a handler knows the keywords; autograd computes the other gradients."""
    received: dict[str, Tensor] = {}

    class Watch:
        def gradient(self, name: str, gradient: Tensor) -> None:
            received[name] = gradient

        def factors(self, name: str, matrix: int, left: Tensor, right: Tensor) -> None:
            received[name] = left.mT @ right

        def rows(self, name: str, rows: Tensor, gradients: Tensor) -> None:
            received[name] = torch.zeros(8, 6).index_copy(0, rows, gradients)

    x, ids = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 3, 1])
    products: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": lambda weight: functional.linear(input=x, weight=weight),
        "embedding": lambda weight: functional.embedding(input=ids, weight=weight),
        "matmul": lambda weight: torch.matmul(x, other=weight.mT),
        "mm": lambda weight: torch.mm(input=x, mat2=weight.mT),
        "method": lambda weight: x.matmul(other=weight.mT),
    }
    for name, product in products.items():
        weight = nn.Parameter(torch.ones(8, 6))
        product(weight).square().sum().backward()  # type: ignore[no-untyped-call]
        expected, weight.grad = weight.grad, None
        gradients = Gradients(Watch())  # type: ignore[arg-type]
        gradients.watch(name, weight)
        with gradients:
            product(weight).square().sum().backward()  # type: ignore[no-untyped-call]
        gradients.finish()
        torch.testing.assert_close(received[name], expected)


def test_factors_of_any_size_give_the_sums_of_the_whole_gradient() -> None:
    """Few rows are summed as quadratic forms, many as the matrix."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.rand(2, count, generator=generator) + 0.5 for count in (300, 400))
    for count in (1, 16, 120, 900):
        left, right = (torch.randn(count, width, generator=generator) for width in (300, 400))
        found, expected = Sums(rows, columns), Sums(rows, columns)
        found.add_factors(1, left, right)
        expected.add_matrix(1, left.mT @ right)
        torch.testing.assert_close(found.total, expected.total, rtol=1e-5, atol=0)
        torch.testing.assert_close(found.by_row, expected.by_row, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.by_column, expected.by_column, rtol=1e-4, atol=1e-4)
        assert not bool(found.by_row[0].any() or found.by_column[0].any())


def test_factors_of_all_matrices_give_the_sums_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.rand(3, 30, generator=generator) + 0.5, torch.rand(1, 40, generator=generator) + 0.5
    left, right = (torch.randn(3, 7, width, generator=generator) for width in (30, 40))
    found, expected = Sums(rows, columns), Sums(rows, columns)
    found.add_stack(left, right)
    expected.add(left.mT @ right)
    torch.testing.assert_close(found.total, expected.total, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.by_row, expected.by_row, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.by_column, expected.by_column, rtol=1e-4, atol=1e-4)


def test_the_needed_memory_follows_the_largest_block(tmp_path: Path) -> None:
    """More layers need memory only for hidden states; a model larger than memory can be measured."""

    def needs(name: str, **own: Any) -> tuple[int, int]:
        checkpoint = open_checkpoint(saved("qwen3_moe", tmp_path / name, own))
        whole = meta_model(checkpoint.path, checkpoint.config)
        return needed_bytes(checkpoint, describe(checkpoint)), 4 * sum(own.numel() for own in whole.parameters())

    few, _ = needs("few", num_hidden_layers=2, moe_intermediate_size=4096)
    many, whole = needs("many", num_hidden_layers=8, moe_intermediate_size=4096)
    states = ROUND * LENGTH * 32 * 4
    assert few + 6 * states == many < whole
    broad, _ = needs("broad", num_hidden_layers=2, moe_intermediate_size=8192)
    assert broad - few > 2 * 4 * (4 * 3 * 4096 * 32)  # twice the gain of four experts


# ---- progress


class Shown:
    """Records progress; stops the job after `stop` tokens."""

    def __init__(self, stop: int = 10**9) -> None:
        self.total, self.done, self.stages, self.finished, self.stop = 0, 0, list[str](), False, stop

    def prepare(self, what: str) -> None: ...

    def start(self, total: int, done: int, unit: str = "weights") -> None:
        self.total = total
        assert unit == "tokens" and not done

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def advance(self, count: int, memory: int) -> None:
        self.done += count
        assert count >= 0 and memory > 0
        if self.done >= self.stop:
            raise KeyboardInterrupt

    def finish(self) -> None:
        self.finished = True


def test_progress_reaches_its_end_and_names_blocks(deep: Path) -> None:
    shown = Shown()
    measured(deep, progress=shown)
    assert shown.done == shown.total == IDS.numel() and shown.finished
    blocks = [f"sensitivity: model.layers.{layer}" for layer in range(6)]
    assert shown.stages == [*blocks, "sensitivity: head", *blocks[::-1], "sensitivity: embedding"]


@pytest.mark.parametrize("stop", [1, 20, 40])
def test_an_interrupt_ends_it_at_once(deep: Path, stop: int) -> None:
    shown = Shown(stop)
    with pytest.raises(KeyboardInterrupt):
        measured(deep, progress=shown)
    assert shown.finished and shown.done < IDS.numel()


# ---- the reasons if importance cannot be measured


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """The example model with a tokenizer that cannot be parsed."""
    shutil.copytree(TINY_MOE, tmp_path / "broken")
    (tmp_path / "broken/tokenizer.json").write_text("{")
    return tmp_path / "broken"


def notes_of(method: Any, model: Path, out: Path) -> tuple[str, ...]:
    return tuple(note for note in estimate(model, out, method).notes if "importance of weights" in note)


def small(**settings: Any) -> Auto:
    return Auto(size="3MB", samples=2, sequence_length=32, **settings)


def test_a_plan_and_a_report_say_why_the_text_was_not_read(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (note,) = notes_of(small(), broken, tmp_path / "out")
    assert "built-in text was not used" in note and "tokenizer cannot be loaded" in note and str(broken) in note
    said = run(capsys, "compress", broken, tmp_path / "out", "--size", "3MB", "--dry-run")[1]
    assert "The built-in text was not used" in " ".join(said.split())
    assert note in moepack.compress(broken, tmp_path / "out", method=small()).notes
    assert not notes_of(small(calibration="none"), broken, tmp_path / "other")
    assert not notes_of(small(), TINY_MOE, tmp_path / "other")


def test_one_method_for_two_checkpoints_reads_the_text_where_it_can(broken: Path, tmp_path: Path) -> None:
    method = small()
    assert notes_of(method, broken, tmp_path / "out") and method.calibration == BUILT_IN
    assert not notes_of(method, TINY_MOE, tmp_path / "out") and method.calibration == BUILT_IN


def little_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("moepack.methods.request.total_bytes", lambda: 1000)


def others_took_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("moepack.calibration.fisher.available_bytes", lambda: 1000)


@pytest.mark.parametrize(
    ("change", "reason"), [(little_memory, "only 1 kB are installed"), (others_took_it, "only 1 kB are free")]
)
def test_too_little_memory_is_reported(
    change: Callable[[pytest.MonkeyPatch], None], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    change(monkeypatch)
    (note,) = notes_of(small(), TINY_MOE, tmp_path / "out")
    assert reason in note and "with its gradients" in note and "a machine with more memory" in note


def test_models_that_read_two_texts_and_short_positions_are_reported(
    switch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (note,) = notes_of(Auto(bits_per_weight=4.0), switch, tmp_path / "out")
    assert "encoder-decoder" in note and "--calibration FILE" in note
    path = saved("qwen3_moe", tmp_path / "short", {})  # 128 positions
    tiny_models.write_tokenizer(path)
    (note,) = notes_of(Auto(bits_per_weight=6.0), path, tmp_path / "out")
    assert "512 tokens are longer than the model's 128 positions: use a shorter sequence length" in note


def test_rate_says_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    others_took_it(monkeypatch)
    method = Rate(3.0, roles="none", calibration=BUILT_IN, samples=2, sequence_length=32)
    notes = moepack.compress(TINY_MOE, tmp_path / "out", method=method).notes
    assert any("estimated, not measured" in note and "only 1 kB are free" in note for note in notes)


@pytest.fixture
def no_tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CalibrationRequest]:
    """A calibration request whose samples are `IDS`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(CalibrationRequest, "load", lambda *_: decoder_samples(IDS))
    yield CalibrationRequest(BUILT_IN, 3, 16, CalibrationSettings())


def test_tensors_that_a_text_does_not_reach_have_factors(no_tokenizer: CalibrationRequest, tmp_path: Path) -> None:
    """Experts of a vision tower have the factors without a text; all others are measured once."""
    checkpoint = open_checkpoint(saved("ernie4_5_vl_moe", tmp_path / "model", {}))
    model = describe(checkpoint)
    found = find_importance(checkpoint, model, no_tokenizer)
    assert found.measured and not found.notes and found.scales.keys() == find_balances(model).keys()
    assert any("vision" in name for name in found.scales)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moepack.methods.rate.importance.fisher", None)
        again = find_importance(checkpoint, model, no_tokenizer)
    assert all(torch.equal(again.scales[name].rows, own.rows) for name, own in found.scales.items())


def test_a_model_that_transformers_cannot_run_is_packed_with_a_note(
    no_tokenizer: CalibrationRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(saved("mixtral", tmp_path / "model", {}))

    def fails(*given: Any, **named: Any) -> None:
        raise AttributeError("no attribute 'image_outputs'")

    monkeypatch.setattr("transformers.MixtralForCausalLM.forward", fails)
    found = find_importance(checkpoint, describe(checkpoint), no_tokenizer)
    assert not found.measured and "no attribute 'image_outputs'" in found.notes[0]


def test_tokens_are_drawn_from_the_softmax_of_the_logits() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0], [50.0, 0.0, 0.0, 49.0]]).repeat_interleave(20_000, 0)
    drawn = draw_tokens(logits, torch.Generator().manual_seed(1)).view(2, -1)
    shares = torch.stack([row.bincount(minlength=4) / len(row) for row in drawn])
    torch.testing.assert_close(shares, logits[::20_000].softmax(-1), rtol=0, atol=0.02)
    assert shares[0, 2] == 0

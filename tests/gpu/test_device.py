"""Packed models on a real GPU."""

import copy
import threading

import numpy as np
import pytest
import torch
import transformers

import moepack
from moepack import GroupwiseTensor, _core
from moepack.backends.gpu import GpuBackend, Uploader, coded_layer, upload
from moepack.backends.gpu import draw as drawing
from moepack.backends.gpu.device import allocate
from moepack.backends.gpu.families import kernels_of
from moepack.backends.gpu.program import Program
from moepack.decoding.decoder import set_decoding
from moepack.errors import DeviceError, DeviceMemoryError, LoadError
from moepack.methods import create
from moepack.methods.qmoe.ternary import Ternary
from moepack.modules import ops
from moepack.modules.experts import PackedExperts
from moepack.modules.linear import PackedLinear
from moepack.registry import open_tensor
from moepack.stores.uploaded import DeviceStore
from oracle.coded import dependent

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module", params=["ternary", "finequant", "rate", "floe", "paper"])
def directory(request, mixtral, tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / request.param
    text = path.with_suffix(".txt")
    text.write_text("She opened the door, and the river ran past the mill. " * 60)
    settings = {
        "rate": {"bits_per_weight": 3},
        "floe": {"calibration": str(text), "sequence_length": 64, "sparsity": 0.5},
    }
    settings["paper"] = settings["floe"] | {"paper_form": True}
    name = "floe" if request.param == "paper" else request.param
    moepack.compress(
        mixtral, path, method=Ternary() if name == "ternary" else create(name, **settings.get(request.param, {}))
    )
    return path


def ids(tokens, batch=2):
    return torch.randint(3, 250, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


@torch.inference_mode()
def logits(model, tokens=20):
    home = "cpu" if model.device.type == "cpu" else GPU  # `model.device` is meta where accelerate brings weights
    return model(ids(tokens).to(home)).logits.float().cpu()


def assert_near(found, expected):
    """Within the error of activations rounded to bfloat16."""
    assert float((found - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize("tokens", [1, 20, 100])
def test_a_model_computes_the_same_on_gpu_and_cpu(directory, tokens):
    cpu, gpu = (moepack.load(directory, dtype="float32", device=device) for device in ("cpu", "cuda"))
    assert {buffer.device for _, buffer in gpu.named_buffers()} == {GPU}
    assert_near(logits(gpu, tokens), logits(cpu, tokens))


def test_models_move_between_devices(directory):
    model = moepack.load(directory, dtype="float32")
    expected = logits(model)
    model.to("cuda")
    assert_near(logits(model), expected)
    twin = copy.deepcopy(model)
    assert_near(logits(twin), expected)
    assert torch.equal(logits(model.to("cpu")), expected)


def test_half_the_layers_on_the_cpu(directory):
    expected = logits(moepack.load(directory, dtype="float32"))
    model = moepack.load(directory, dtype="float32", device_map={"": 0, "model.layers.1": "cpu"})
    first, second = (module for module in model.modules() if isinstance(module, PackedExperts))
    assert {buffer.device for buffer in first.buffers()} == {GPU}
    assert {buffer.device.type for buffer in second.buffers()} == {"cpu"}
    assert_near(logits(model), expected)


def first_layer(model):
    """Memory for the embedding and exactly one layer."""
    layer = sum(tensor.nbytes for tensor in (*model.model.layers[0].parameters(), *model.model.layers[0].buffers()))
    return 4 * model.config.vocab_size * model.config.hidden_size + int(1.2 * layer)


def test_automatic_maps_fall_back_to_the_cpu_by_layers(directory):
    expected = logits(moepack.load(directory, dtype="float32"))
    cpu = moepack.load(directory, dtype="float32")
    room = {0: first_layer(cpu), "cpu": 10**9}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, device_map="auto", max_memory=room, dtype=torch.float32
    )
    assert {str(device) for device in model.hf_device_map.values()} == {"0", "cpu"}
    assert_near(logits(model.eval()), expected)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
SECOND = torch.device("cuda", 1)


@two_gpus
@pytest.mark.parametrize("split", ["by name", "by memory"])
def test_layers_on_two_gpus(directory, split):
    """An automatic map keeps a model together that fits on one GPU, so the first one is given little memory."""
    cpu = moepack.load(directory, dtype="float32")
    parts = (
        "model.embed_tokens",
        "model.rotary_emb",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "lm_head",
    )  # the head is tied
    place = {"device_map": dict(zip(parts, (0, 0, 0, 1, 1, 0), strict=True))}
    if split == "by memory":
        place = {"device_map": "auto", "max_memory": {0: first_layer(cpu), 1: 10**9}}
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **place).eval()
    assert {tensor.device.index for tensor in (*model.parameters(), *model.buffers())} == {0, 1}
    assert_near(logits(model), logits(cpu))
    prompt, options = ids(9), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found, expected = model.generate(prompt.cuda(), **options), cpu.generate(prompt, **options)
    assert (found.cpu() == expected).float().mean() > 0.6


@two_gpus
def test_a_model_on_the_second_gpu(directory):
    model = moepack.load(directory, dtype="float32", device="cuda:1")
    with torch.inference_mode():
        found = model(ids(20).to(SECOND)).logits.cpu()
    assert_near(found, logits(moepack.load(directory, dtype="float32")))


def written(model, batch, mode=None):
    """The tokens of a model, and the distance of its first logits from another's."""
    prompt = ids(9, batch=batch).to(model.device)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    set_decoding(mode)
    try:
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options).cpu()
    finally:
        set_decoding(None)


@two_gpus
@pytest.mark.parametrize("batch", [1, 4])
def test_graphs_of_a_model_that_is_not_on_the_current_gpu(directory, batch):
    """Recorded and replayed under the model's own device, with either device as the current one."""
    models = [moepack.load(directory, dtype="float32", device=f"cuda:{number}") for number in (0, 1)]
    expected = written(models[0], batch, "transformers")
    for current in (0, 1):
        with torch.cuda.device(current):
            for model in models:
                before = model.model.forward.steps
                found = written(model, batch)
                assert model.model.forward.steps - before > 15
                assert (found == expected).float().mean() > 0.9


def test_generation_replays_graphs(directory):
    model = moepack.load(directory, dtype="bfloat16", device="cuda")
    prompt = ids(9, batch=3).cuda()
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert model.model.forward.steps > 30
    try:
        set_decoding("transformers")
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    finally:
        set_decoding(None)
    assert (found == expected).float().mean() > 0.6  # bfloat16 rounding makes texts diverge


def test_compiled_models(directory):
    model = moepack.load(directory, dtype="float32", device="cuda")
    expected = logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        assert_near(compiled(ids(20).cuda()).logits.float().cpu(), expected)


def test_streams_and_threads_at_once(directory):
    model = moepack.load(directory, dtype="float32", device="cuda")
    expected = [logits(model, tokens) for tokens in range(1, 9)]
    found = [None] * 8

    def run(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                found[number] = logits(model, number + 1)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def integers():
    weight = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))
    return GroupwiseTensor.quantize(weight, 4, 64)


def test_prompts_in_float32_are_not_rounded():
    tensor, x = integers(), torch.randn(100, 128)
    layer = PackedLinear(40, 128)
    DeviceStore(GPU).put(layer, "packed", torch.from_numpy(tensor.data.copy()), tensor="packed")
    expected = x.double() @ tensor.dequantize().double().T
    assert float((layer(x.cuda()).cpu() - expected).norm() / expected.norm()) < 1e-6


def column_scales(rows, columns, seed=1):
    """Rows of scales of columns that differ by orders of magnitude; None for no rows."""
    random = np.random.default_rng(seed)
    scales = np.exp2(random.normal(0, 1.5, (rows, columns))) * random.choice((-1, 1), (rows, columns))
    return scales.astype(np.float32) if rows else None


def coded(shape, *, paths, stream_rows=None, columns=None, seed=0):
    """Gaussian integers with outliers, and their tensor; with `paths` they are the indices of its dependent codes."""
    random = np.random.default_rng(seed)
    codes = np.rint(random.standard_normal(shape) * random.choice((1, 9), shape, p=(0.99, 0.01))).astype(np.int64)
    codes = (dependent(codes) if paths else codes).astype(np.int32)
    scale = np.full((1, 1), 0.25, np.float32)
    form = {"stream_rows": stream_rows, "symbols": "dependent" if paths else "plain", "columns": columns}
    return codes, _core.encode_coded(codes, scale, ndim=3, **form)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("paths", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_coded_tensors_have_another_layout_on_a_gpu(paths, dtype, rows):
    columns = column_scales(rows, 300)
    codes, packed = coded((3, 70, 300), paths=paths, columns=columns)
    values = np.float32(0.25) * codes.astype(np.float32)
    expected = torch.from_numpy(values if columns is None else values * columns[:, None])
    matrix = upload(torch.from_numpy(packed), Uploader(GPU))
    out = torch.empty(3, 70, 300, dtype=dtype, device=GPU)
    kernels_of("coded").dequantize(matrix, 0, out)
    assert torch.equal(out.cpu(), expected.to(dtype))
    part = torch.empty(2, 70, 300, dtype=dtype, device=GPU)
    kernels_of("coded").dequantize(matrix, 1, part)
    assert torch.equal(part.cpu(), expected[1:].to(dtype))
    back = open_tensor(matrix.data.cpu().numpy())
    np.testing.assert_array_equal(back.dequantize(), expected.numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_columns_whose_scales_are_zero_are_zero(dtype):
    columns = column_scales(1, 300)
    columns[:, ::3] = 0
    codes, packed = coded((1, 70, 300), paths=False, columns=columns)
    matrix = upload(torch.from_numpy(packed), Uploader(GPU))
    out = torch.empty(1, 70, 300, dtype=dtype, device=GPU)
    kernels_of("coded").dequantize(matrix, 0, out)
    expected = torch.from_numpy(np.float32(0.25) * codes.astype(np.float32) * columns)
    assert torch.equal(out.cpu(), expected.to(dtype))
    x, product = torch.randn(3, 300, device=GPU), torch.empty(3, 70, device=GPU)
    kernels_of("coded").linear(matrix, x, product)
    assert_near(product.cpu(), x.cpu().double() @ expected[0].double().T)


@pytest.mark.parametrize("paths", [False, True])
@pytest.mark.parametrize(
    ("shape", "stream_rows"), [((1, 1, 1), 16), ((3, 79, 256), 64), ((2, 33, 777), 16), ((1, 64, 5000), None)]
)
@pytest.mark.parametrize("shared", [None, True, False])
def test_layouts_made_on_a_gpu_are_those_of_the_core(shape, stream_rows, paths, shared):
    columns = None if shared is None else column_scales(1 if shared else shape[0], shape[2])
    _, packed = coded(shape, paths=paths, stream_rows=stream_rows, columns=columns)
    matrix = upload(torch.from_numpy(packed), Uploader(GPU))
    np.testing.assert_array_equal(matrix.data.cpu().numpy(), _core.coded_to_device(packed))


@pytest.mark.parametrize("paths", [(True, True, True), (False, True, False), (True, False, True)])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_products_of_dependent_codes_and_of_plain_ones_beside_them(tokens, paths):
    shapes, generator = ((4, 96, 520), (4, 96, 520), (4, 520, 96)), torch.Generator().manual_seed(tokens)
    weights, matrices = [], []
    for shape, each in zip(shapes, paths, strict=True):
        codes, packed = coded(shape, paths=each)
        weights.append(0.25 * torch.from_numpy(codes).double())
        matrices.append(upload(torch.from_numpy(packed), Uploader(GPU)))
    x, chosen = torch.randn(tokens, 520, generator=generator), torch.rand(tokens, 2, generator=generator)
    index = torch.rand(tokens, 4, generator=generator).argsort(1)[:, :2].contiguous()
    hidden, out = torch.empty(2 * tokens, 96, device=GPU), torch.empty(tokens, 520, device=GPU)
    kernels_of("coded").gated(*matrices[:2], x.to(GPU), index.to(GPU), hidden)
    kernels_of("coded").combine(matrices[2], hidden, index.to(GPU), chosen.to(GPU), out)
    gate, up = (torch.einsum("tc,tkrc->tkr", x.double(), weight[index]) for weight in weights[:2])
    expected = torch.nn.functional.silu(gate) * up
    assert_near(hidden.cpu().view(tokens, 2, 96), expected)
    assert_near(out.cpu(), torch.einsum("tkc,tkrc,tk->tr", expected, weights[2][index], chosen.double()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("width", [8, 301, 5000])
def test_linear_layers_with_scales_of_columns(dtype, tokens, width):
    _, packed = coded((1, 70, width), paths=False, columns=column_scales(1, width))
    weight = torch.from_numpy(_core.PackedTensor(packed).dequantize()[0]).double()
    matrix = upload(torch.from_numpy(packed), Uploader(GPU))
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    out = torch.empty(tokens, 70, device=GPU)
    kernels_of("coded").linear(matrix, x.to(GPU), out)
    assert_near(out.cpu(), x.double() @ weight.T)


COLUMN_SCALES = {
    "gate alone": ((4, 1), (0, 1), (0, 1)),
    "up alone": ((0, 1), (1, 1), (0, 1)),
    "down shared": ((0, 1), (0, 1), (1, 1)),
    "down own": ((0, 1), (0, 1), (4, 1)),
    "the same shared": ((1, 1), (1, 1), (4, 2)),
    "the same own": ((4, 1), (4, 1), (1, 2)),
    "different shared": ((1, 1), (1, 2), (1, 3)),
    "different own": ((4, 1), (4, 2), (4, 3)),
    "shared and own": ((1, 1), (4, 1), (4, 1)),
}
"""Rows of scales of columns, of four experts, and their seeds: of gate, up and down."""


@pytest.mark.parametrize("scaled", COLUMN_SCALES.values(), ids=list(COLUMN_SCALES))
@pytest.mark.parametrize("tokens", [1, 5, 30, 40])
@pytest.mark.parametrize("paths", [False, True])
@pytest.mark.parametrize(("width", "inner"), [(300, 96), (44, 4100)])
def test_experts_with_scales_of_columns(scaled, tokens, paths, width, inner):
    """Long rows of many tokens have no room for the sums of all experts; some slots have no expert."""
    shapes, generator = ((4, inner, width), (4, inner, width), (4, 40, inner)), torch.Generator().manual_seed(tokens)
    weights, matrices = [], []
    for number, (shape, (rows, seed)) in enumerate(zip(shapes, scaled, strict=True)):
        _, packed = coded(shape, paths=paths, columns=column_scales(rows, shape[2], seed), seed=number)
        weights.append(torch.from_numpy(_core.PackedTensor(packed).dequantize()).double())
        matrices.append(upload(torch.from_numpy(packed), Uploader(GPU)))
    x, chosen = torch.randn(tokens, width, generator=generator), torch.rand(tokens, 3, generator=generator)
    index = torch.rand(tokens, 5, generator=generator).argsort(1)[:, :3].contiguous()  # expert 4 does not exist
    there = index < 4
    hidden = torch.full((3 * tokens, inner), 7.0, device=GPU)
    out, projected = torch.empty(tokens, 40, device=GPU), torch.full((3 * tokens, inner), 7.0, device=GPU)
    kernels, on_gpu = kernels_of("coded"), index.to(GPU)
    kernels.gated(*matrices[:2], x.to(GPU), on_gpu, hidden)
    kernels.project(matrices[1], x.to(GPU), on_gpu, projected)
    kernels.combine(matrices[2], hidden, on_gpu, chosen.to(GPU), out)

    tables = [torch.cat([weight, torch.zeros_like(weight[:1])]) for weight in weights]
    gate, up = (
        torch.stack([x.double() @ table[expert].T for expert in range(5)], 1).gather(
            1, index[..., None].expand(-1, -1, inner)
        )
        for table in tables[:2]
    )
    expected = torch.nn.functional.silu(gate) * up
    found, products = hidden.cpu().view(tokens, 3, inner), projected.cpu().view(tokens, 3, inner)
    assert (found[~there] == 7).all() and (products[~there] == 7).all()
    assert_near(found[there], expected[there])
    assert_near(products[there], up[there])
    # Computed from the kernels' outputs, because they round hidden values differently.
    given = torch.where(there[..., None], found.double(), 0)
    total = sum(
        chosen[:, j, None].double() * torch.einsum("ti,tri->tr", given[:, j], tables[2][index[:, j]]) for j in range(3)
    )
    assert_near(out.cpu(), total)
    if coded_layer.supports(matrices, index.numel()):
        assert_near(coded_layer.experts(matrices, x.to(GPU), on_gpu, chosen.to(GPU)).cpu(), total)


def test_operators_obey_torch():
    data = torch.from_numpy(integers().data.copy()).cuda()
    torch.library.opcheck(torch.ops.moepack.linear.default, (torch.randn(5, 128, device=GPU), data, 40, None))


def test_a_captured_product_follows_its_input():
    tensor = integers()
    data, x = torch.from_numpy(tensor.data.copy()).cuda(), torch.randn(3, 128, device=GPU)
    ops.linear(x, data, 40, None)
    layer = PackedLinear(40, 128)
    layer.attach("packed", data)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        out = layer(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert_near(out.cpu(), tensor.matmul(x.cpu()))


def test_nothing_is_loaded_while_a_graph_is_captured():
    program = Program("groupwise.cu", BITS=4, GROUP=32, SYMMETRIC=1, HALVES=0, TOKENS=8, RESIDENT=2, NEVER_LOADED=1)
    with pytest.raises(DeviceError, match="run the model once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=GPU)
        program.kernel("combine")


def test_uploads_are_exact():
    source = torch.randint(0, 256, ((64 << 20) + 12345,), dtype=torch.uint8)
    target = torch.zeros(len(source), dtype=torch.uint8, device=GPU)
    Uploader(GPU).copy(source, target)
    assert torch.equal(target.cpu(), source)


def test_too_little_memory():
    with pytest.raises(DeviceMemoryError, match=r"'packed' takes 1125899.91 GB, but .* are missing"):
        allocate(1 << 50, GPU, "'packed'")


def test_tensors_elsewhere_are_refused():
    layer = PackedLinear(40, 128)
    layer.attach("packed", torch.from_numpy(integers().data.copy()).cuda())
    with pytest.raises(LoadError, match=r"'cuda:0' cannot be used on 'cpu'"):
        layer(torch.randn(5, 128))
    with pytest.raises(DeviceError, match="there is no 'cuda:77'"):
        DeviceStore(torch.device("cuda", 77))


@pytest.mark.parametrize("paths", [False, True])
@pytest.mark.parametrize("tokens", [70, 200, 300, 500])
def test_coded_layers_of_many_tokens_in_a_graph_follow_the_routing(paths, tokens):
    generator = torch.Generator().manual_seed(tokens)
    weights, matrices = [], []
    for number, shape in enumerate([(70, 40, 300), (70, 40, 300), (70, 300, 40)]):
        _, packed = coded(shape, paths=paths, columns=column_scales(1, shape[2], 1), seed=number)
        weights.append(torch.from_numpy(_core.PackedTensor(packed).dequantize()).double())
        matrices.append(upload(torch.from_numpy(packed), Uploader(GPU)))
    x = torch.randn(tokens, 300, generator=generator).bfloat16()
    chosen = torch.rand(tokens, 8, generator=generator)

    def routing():
        return torch.rand(tokens, 70, generator=generator).argsort(1)[:, :8].contiguous()

    def expected(index):
        gate, up = (torch.einsum("tc,tkrc->tkr", x.double(), weight[index]) for weight in weights[:2])
        hidden = torch.nn.functional.silu(gate) * up
        return torch.einsum("tkc,tkrc,tk->tr", hidden, weights[2][index], chosen.double())

    first, other = routing(), routing()
    given = x.to(GPU), first.to(GPU), chosen.to(GPU)

    def layer():
        return GpuBackend().experts(matrices, *given, torch.nn.functional.silu, None)

    assert_near(layer().cpu(), expected(first))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    given[1].copy_(other)
    graph.replay()
    again = out.clone()
    graph.replay()
    assert torch.equal(out, again)
    assert_near(out.cpu(), expected(other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [16384, 50001, 151936])
def test_teams_of_blocks_draw_what_a_single_block_draws(monkeypatch, vocabulary, dtype):
    generator = torch.Generator().manual_seed(vocabulary)
    settings = [(0, 0, 1, 0), (0.7, 0, 1, 0), (1, 40, 1, 0), (0.9, 0, 0.9, 0), (1.2, 50, 0.8, 0.05), (2, 1, 1, 0)]
    draws = torch.tensor([[*each, 0] for each in settings], dtype=torch.float64).T.repeat(1, 12)
    draws[4] = torch.rand(72, generator=generator, dtype=torch.float64)
    logits = (3 * torch.randn(72, vocabulary, generator=generator)).to(dtype)
    logits[7, vocabulary // 2], logits[13, -1] = torch.nan, torch.inf
    given = logits.to(GPU), draws.to(GPU)
    found = drawing.draw(*given).tolist()
    monkeypatch.setattr(drawing, "_WIDE", 1 << 30)
    assert found == drawing.draw(*given).tolist()
    assert [at for at, token in enumerate(found) if token < 0] == [7, 13]

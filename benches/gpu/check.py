"""Compares every kernel with float64 products of the core's values on a GPU: random inputs, poisoned outputs, odd
shapes, skipped and repeated experts, graphs replayed with another routing, a busy second stream, and equal bits in a
second run.

    PYTHONPATH=python python -m benches.gpu.check [--families groupwise] [--only NAME] [--seed N]
"""

import argparse
import sys
import time

import torch
from torch import Tensor
from torch.nn import functional

from benches.gpu.cases import FAMILIES, Make, on_device, routing, seen, specifications
from moepack import _core
from moepack.backends.base import Between, Clamped
from moepack.backends.gpu import coded_layer, grouped
from moepack.backends.gpu.backend import GpuBackend
from moepack.backends.gpu.families import kernels_of
from moepack.backends.gpu.matrix import DeviceMatrix

EXACT = 1e-5
"""Bound of the relative error if only sums are rounded."""

GATED = 1.7
"""The factor of silu(gate) * up on the independent errors of gate and up: the norm of 1 and of the derivative of silu's
logarithm, at most 1.3 for products of about one."""

ROUNDED = 5e-4
"""The bound for float32 activations; kernels keep 11 of their bits."""

DECODED = 1e-2
"""The bound of layers with many tokens whose weights are decoded to bfloat16."""


def error(out: Tensor, expected: Tensor) -> float:
    """The norm of the difference relative to that of the result; NaN counts as infinite."""
    difference = (out.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    return float(difference) if bool(out.isfinite().all()) else float("inf")


class Case:
    """A layer of experts of a specification, and its values in float64."""

    def __init__(self, make: Make, experts: int, inner: int, outer: int, seed: int) -> None:
        packed = [make(experts, *shape, seed + i) for i, shape in enumerate([(inner, outer)] * 2 + [(outer, inner)])]
        self.gate, self.up, self.down = map(on_device, packed)
        self.values = [torch.from_numpy(_core.PackedTensor(data).dequantize()).double().cuda() for data in packed]
        self.kernels = kernels_of(self.gate.kind)
        self.experts, self.inner, self.outer = experts, inner, outer
        self.rounds = True  # whether products round activations: decoded weights do not

    def _seen(self, matrix: DeviceMatrix, x: Tensor) -> Tensor:
        return seen(matrix, x) if self.rounds else x.double()

    def hidden(self, x: Tensor, index: Tensor) -> Tensor:
        """The expected output of `gated`; rows of missing experts stay poisoned."""
        out = torch.full((index.numel(), self.inner), float("nan"), dtype=torch.float64, device="cuda")
        for slot, expert in enumerate(index.flatten().tolist()):
            if 0 <= expert < self.experts:
                token = self._seen(self.gate, x[slot // index.shape[1]].unsqueeze(0))[0]
                out[slot] = functional.silu(self.values[0][expert] @ token) * (self.values[1][expert] @ token)
        return out

    def combined(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The expected output of `combine`."""
        out = torch.zeros(len(index), self.outer, dtype=torch.float64, device="cuda")
        for slot, expert in enumerate(index.flatten().tolist()):
            if 0 <= expert < self.experts:
                value = self.values[2][expert] @ self._seen(self.down, hidden[slot].unsqueeze(0))[0]
                out[slot // index.shape[1]] += weights.flatten()[slot].double() * value
        return out


def poisoned(*shape: int) -> Tensor:
    """A float32 output filled with NaN."""
    return torch.full(shape, float("nan"), device="cuda")


def check_linear(case: Case, matrix: DeviceMatrix, values: Tensor, tokens: int, dtype: torch.dtype) -> float:
    """The error of a linear layer of the first expert."""
    x = torch.randn(tokens, values.shape[1], device="cuda").to(dtype)
    out = poisoned(tokens, values.shape[0])
    case.kernels.linear(matrix, x, out)
    return error(out, seen(matrix, x) @ values.T)


def check_layer(case: Case, index: Tensor, weights: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """The errors of the two launches of a layer; two runs must give the same bits."""
    x = torch.randn(len(index), case.outer, device="cuda").to(dtype)
    expected = case.hidden(x, index)
    active = ~expected[:, 0].isnan()
    outputs = []
    for _ in range(2):
        hidden, out = poisoned(index.numel(), case.inner), poisoned(len(index), case.outer)
        case.kernels.gated(case.gate, case.up, x, index, hidden)
        case.kernels.combine(case.down, hidden, index, weights, out)
        outputs.append((hidden, out))
    (hidden, out), (hidden_again, out_again) = outputs
    assert torch.equal(hidden[active], hidden_again[active]) and torch.equal(out, out_again), "not deterministic"
    assert bool(hidden[~active].isnan().all()), "skipped experts were written"
    return error(hidden[active], expected[active]), error(out, case.combined(hidden, index, weights))


def check_prompt(case: Case, tokens: int, generator: torch.Generator) -> tuple[str, float]:
    """The error of a captured layer of many tokens replayed with another routing, and the name of its bound."""
    matrices = [case.gate, case.up, case.down]
    top_k = min(3, case.experts)
    x = torch.randn(tokens, case.outer, device="cuda").bfloat16()
    index, weights = routing(tokens, top_k, case.experts, generator)
    index[0, 0], index[-1, -1] = case.experts, -1
    fused = grouped.supports(matrices) or coded_layer.supports(matrices, index.numel())
    backend, name = GpuBackend(), "many" if fused else "decoded"
    out, found = backend.experts(matrices, x, index, weights, functional.silu, None), []
    for case.rounds in (True, False) if name == "decoded" else (True,):  # calls of 64 tokens round activations
        found.append(error(out, case.combined(case.hidden(x, index), index, weights)))
    worst = min(found)
    if name == "many":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = backend.experts(matrices, x, index, weights, functional.silu, None)
        other, scales = routing(tokens, top_k, case.experts, generator)
        other[other == 1] = 0
        x.copy_(torch.randn_like(x)), index.copy_(other), weights.copy_(scales), out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        again = out.clone()
        graph.replay()
        assert torch.equal(out, again), "not deterministic"
        worst = max(worst, error(out, case.combined(case.hidden(x, index), index, weights)))
    case.rounds = True
    return name, worst


def clamped_code(case: Case) -> Between:
    """A clamped gate with random biases, also as torch's operations on rows."""
    gate_bias, bias = (
        torch.randn(case.experts, size, device="cuda").bfloat16() for size in (2 * case.inner, case.outer)
    )

    def between(parts: list[Tensor], expert: Tensor) -> Tensor:
        biases = gate_bias[expert].to(parts[0].dtype).unflatten(-1, (-1, 2))
        gate, up = (parts[0] + biases[..., 0]).clamp(max=2), (parts[1] + biases[..., 1]).clamp(-2, 2)
        return (up + 1) * gate * torch.sigmoid(1.7 * gate)

    def behind(outputs: Tensor, expert: Tensor) -> Tensor:
        return outputs + bias[expert].to(outputs.dtype)

    return Between(between, behind, Clamped(1.7, 2.0, gate_bias, bias, True))


def own_outputs(case: Case, code: Between, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The expected outputs of experts with code of their own."""
    out = torch.zeros(len(x), case.outer, dtype=torch.float64, device="cuda")
    rows = case._seen(case.gate, x)
    for slot, expert in enumerate(index.flatten().tolist()):
        if not 0 <= expert < case.experts:
            continue
        of = torch.tensor([expert], device="cuda")
        token = rows[slot // index.shape[1]]
        inner = code.between([(values[expert] @ token)[None] for values in case.values[:2]], of)
        output = code.behind(case._seen(case.down, inner.float()) @ case.values[2][expert].T, of)
        out[slot // index.shape[1]] += weights.flatten()[slot].double() * output[0]
    return out


def check_own(case: Case, tokens: int, generator: torch.Generator) -> float:
    """The error of experts with a clamped gate, by its kernels and by torch; captured calls get another routing."""
    x = torch.randn(tokens, case.outer, device="cuda").bfloat16()
    index, weights = routing(tokens, min(3, case.experts), case.experts, generator)
    matrices, clamped, worst = [case.gate, case.up, case.down], clamped_code(case), 0.0
    for code in (clamped, clamped._replace(clamped=None)):
        out = GpuBackend().own_experts(matrices, x, index, weights, code, None)
        if out is None:  # too many tokens
            return 0.0
        worst = max(worst, error(out, own_outputs(case, code, x, index, weights)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = GpuBackend().own_experts(matrices, x, index, weights, code, None)
        assert out is not None
        other, scales = routing(tokens, index.shape[1], case.experts, generator)
        other[0, 0], other[-1, -1] = case.experts, -1
        index.copy_(other), weights.copy_(scales)
        graph.replay()
        worst = max(worst, error(out, own_outputs(case, code, x, index, weights)))
    return worst


def check_graph(case: Case, generator: torch.Generator) -> float:
    """The error of a captured layer replayed with other tokens and another routing, next to a busy stream."""
    tokens, top_k = 4, min(2, case.experts)
    x = torch.randn(tokens, case.outer, device="cuda").bfloat16()
    index, weights = routing(tokens, top_k, case.experts, generator)
    hidden, out = poisoned(tokens * top_k, case.inner), poisoned(tokens, case.outer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.kernels.gated(case.gate, case.up, x, index, hidden)
        case.kernels.combine(case.down, hidden, index, weights, out)
    busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    worst = 0.0
    for _ in range(3):
        other, scales = routing(tokens, top_k, case.experts, generator)
        x.copy_(torch.randn_like(x)), index.copy_(other), weights.copy_(scales), out.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            for _ in range(4):
                noise = functional.normalize(noise @ noise)
        graph.replay()
        torch.cuda.synchronize()
        worst = max(worst, error(hidden, case.hidden(x, index)), error(out, case.combined(hidden, index, weights)))
    return worst


def check_specification(make: Make, seed: int) -> dict[str, float]:
    """The worst error of each kernel over shapes, batches and routings."""
    generator = torch.Generator().manual_seed(seed)
    worst: dict[str, float] = {}

    def note(name: str, value: float) -> None:
        worst[name] = max(worst.get(name, 0.0), value)

    for experts, inner, outer in ((1, 7, 33), (1, 520, 3000), (5, 72, 200), (8, 384, 1000)):
        case = Case(make, experts, inner, outer, seed)
        for dtype, name in ((torch.bfloat16, "dequantize"), (torch.float32, "to float32")):
            out = torch.full((experts, inner, outer), float("nan"), device="cuda", dtype=dtype)
            case.kernels.dequantize(case.gate, 0, out)
            note(name, error(out, case.values[0]))
        for tokens in (1, 3, 8, 9, 17, 33, 64):
            dtype = torch.bfloat16 if tokens % 2 else torch.float16
            if experts == 1:
                note("linear", check_linear(case, case.gate, case.values[0][0], tokens, dtype))
                note("linear", check_linear(case, case.down, case.values[2][0], tokens, dtype))
            index, weights = routing(tokens, min(3, experts), experts, generator)
            if tokens % 3 == 0:
                index[0, 0], index[-1, -1] = experts, -1
                index[1] = int(index[1, 0])
            hidden, combined = check_layer(case, index, weights, dtype)
            note("gated", hidden)
            note("combine", combined)
        note("graph", check_graph(case, generator))
        for tokens in (65, 300) if experts > 1 else ():
            note(*check_prompt(case, tokens, generator))
        for tokens in (1, 17, 300) if experts > 1 else ():
            note("own", check_own(case, tokens, generator))
    return worst


def main() -> None:
    """Run the requested checks; exit with 1 if an error exceeds its bound."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--only", nargs="*", default=[""], help="substrings of the names of specifications")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    torch.manual_seed(options.seed)
    failed = False
    for name, make in specifications(options.families).items():
        if not any(part in name for part in options.only):
            continue
        worst = check_specification(make, options.seed)
        family = sys.modules.get(make.func.__module__)
        rounded = getattr(family, "ERROR", EXACT)
        linear = getattr(family, "LINEAR_ERROR", rounded)
        bounds = {"dequantize": 3e-3, "to float32": EXACT, "linear": linear, "gated": GATED * rounded}
        bounds |= {name: GATED * max(linear, ROUNDED) for name in ("many", "own")} | {"decoded": DECODED}
        wrong = [kernel for kernel, value in worst.items() if not value <= bounds.get(kernel, ROUNDED)]
        failed = failed or bool(wrong)
        print(f"{name:32}", *(f"{kernel} {value:.1e}" for kernel, value in worst.items()), "WRONG" if wrong else "")
    sys.exit(failed)


if __name__ == "__main__":
    main()

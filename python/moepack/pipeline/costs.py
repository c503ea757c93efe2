"""What a job takes: processor time by stage, and memory, from the shapes of its tensors.

The time consists of:

- `plan`: methods that allocate bytes code a sample of the weights several times (`auto`: two ways of coding).
- `sensitivity`: `auto` and `rate` run each piece of the text through the model and back.
- `run`: the model runs over the text, once with original and once with packed weights.
- `solve`: calibrated solvers; a part for each layer and column, which threads do not share, and one for each weight.
- `pack`: rounding and encoding.

Constants are processor seconds of one thread of a Zen 5 or of a Xeon of its speed (`benches/cpu/costs.py`,
`benches/results/costs-zen5.json` and `costs-xeon.json`); on another processor, times change with its speed. Memory
counts what a job holds at the same time, in its largest stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moepack.calibration.activations import MOST
from moepack.calibration.fisher import LENGTH
from moepack.methods.parallel import MAX_WORKERS

__all__ = ["PROCESS", "TEXT_STAGES", "Load", "Shape", "job_memory", "job_seconds"]

PROCESS = 350 << 20
"""Memory in bytes of a process that has imported torch."""

RUNNING = 130 << 20
"""Additional memory in bytes once transformers has built or run a model in the process."""

BLOCKS = 120 << 20
"""Additional memory in bytes once blocks have run on a text: what the allocator keeps of attention, routers and copies
in float32. Measured 30 to 320 MB."""

WORKING, WHOLE = 32, 5
"""Working memory in bytes per weight of the experts being packed (float32 copies and candidates), and of a linear
layer, which is packed in parts."""

SAMPLED = 1 << 25
"""Maximum number of weights that a plan samples (`methods.rate.sample`)."""

STARTED = 1.4
"""Seconds to describe the model, which transformers builds without weights."""

PLAN = {"auto": (1.0, 0.04, 1.3e-7), "rate": (0.3, 0.0, 4e-8)}
"""Seconds of a plan: to search for steps, per tensor whose formats are compared, and per sampled weight."""

SAMPLE_MEMORY, MATRIX_MEMORY = 4, 8
"""Memory of a plan in bytes per sampled weight, and per weight of the largest matrix, whose balance is computed."""

FORWARD, BACKWARD = 1.0, 3.0
"""Passes over the weights of a block; the backward pass repeats the forward pass."""

TOKEN_SECONDS = 1.2e-11
"""Seconds per weight, token that visits it, and pass of the model in float32."""

STATES = 16
"""Memory in bytes per token and hidden unit: float32 states of two streams, and the inputs of the experts."""

ROOM = 64 << 20
"""States in bytes that are in memory with the smallest layers; see `in_file`."""

GRADIENT, GRADIENTS = 5e-9, 1.0
"""Seconds per weight and window to square a gradient, and of all else in the measurement of the sensitivity."""

SOLVER = {"column": 3.2e-4, "weight": 8e-8, "cube": 4e-11}
"""Seconds of calibrated solving: per column and pass ("column"), per weight and pass ("weight"), and per columns
cubed to factorize a Hessian ("cube")."""

EACH = {"coded": 0.16, "int": 0.05}
"""Seconds to start a layer of experts or a linear layer, by the kind of product."""

PASSES = {"coded": (3.0, 2.0), "int": (1.7, 1.7)}
"""Mean number of solver passes over a linear layer and over experts, by the kind of product, in units of a pass of
coded integers. Integers in groups take one pass of GPTQ, and three cheap ones that replace codes and scales."""

HESSIAN = 28
"""Calibration memory in bytes per expert being packed and pair of columns: sums of the inputs and of the drift, their
scaled copies, and factors."""

TEXT_STAGES = ("sensitivity", "run", "solve")
"""Stages that only jobs with a text have."""

ENDS = ("embedding", "head")
"""Roles that are packed without the text."""

Shape = tuple[str, int, int, int]
"""Role, experts, rows and columns of a packed tensor."""


@dataclass(frozen=True)
class Load:
    """A job, as far as its costs are concerned.

    Attributes:
        method: name of the method.
        seconds: seconds in which one thread packs 10^9 weights without a text (`Settings.seconds`).
        kernel: the kind of product (`Method.kernel`), which tells how tensors are solved.
        layers: packed tensors of each shard.
        packed: largest packed size of a shard in bytes.
        tokens, length: number of calibration tokens, and of a window; 0 without a text.
        group: experts solved together.
        share: share of the tokens that visit an expert.
        width: size of the hidden states.
        measured: tokens on which the sensitivity is measured; 0 if it is not.
        measuring: memory of that measurement in bytes.
        threads: number of threads.
    """

    method: str
    seconds: float | None
    kernel: str | None
    layers: tuple[tuple[Shape, ...], ...]
    packed: float
    tokens: int
    length: int
    group: int
    share: float
    width: int
    measured: int
    measuring: int
    threads: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name; equal consecutive layers are counted."""
        found = asdict(self)
        counted: list[list[Any]] = []
        for layer in self.layers:
            if counted and counted[-1][1] == layer:
                counted[-1][0] += 1
            else:
                counted.append([1, layer])
        return {**found, "layers": counted}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Load:
        """Read the result of `to_json`."""
        layers = tuple(tuple(map(tuple, layer)) for count, layer in found["layers"] for _ in range(count))
        return cls(**{**found, "layers": layers})

    @property
    def shapes(self) -> list[Shape]:
        """All packed tensors."""
        return [shape for layer in self.layers for shape in layer]

    @property
    def weights(self) -> int:
        """Number of packed weights."""
        return sum(math.prod(shape[1:]) for shape in self.shapes)

    @property
    def largest(self) -> int:
        """Number of weights of the largest layer."""
        return max((sum(math.prod(shape[1:]) for shape in layer) for layer in self.layers), default=0)

    @property
    def workers(self) -> int:
        """Threads that share the work on experts."""
        return min(self.threads, MAX_WORKERS)


def in_file(tokens: int, width: int, weights: int) -> bool:
    """Return whether the states of a job are kept in a mapped file, because memory promises little for its layers.

    Args:
        tokens, width: number of calibration tokens, and size of a hidden state.
        weights: weights of the largest packed layer.
    """
    return STATES * tokens * width > ROOM + 4 * weights


def job_seconds(load: Load) -> dict[str, float] | None:
    """Return the expected wall seconds by stage on an idle machine; None if the method has no estimate."""
    if load.seconds is None:
        return None
    reads = sum(math.prod(shape[1:]) * (load.share if shape[0] == "experts" else 1.0) for shape in load.shapes)
    searching, compared, sampled = PLAN.get(load.method, (0.0, 0.0, 0.0))
    runs = 2 * FORWARD * TOKEN_SECONDS * reads * load.tokens
    back = 0.0
    if load.measured:
        windows = load.measured / min(LENGTH, load.length or LENGTH)
        back = GRADIENTS + GRADIENT * load.weights * windows
        back += (FORWARD + BACKWARD) * TOKEN_SECONDS * reads * load.measured / 2
    return {
        "plan": STARTED + searching + compared * len(load.shapes) + sampled * min(load.weights, SAMPLED),
        "sensitivity": back / load.threads,
        "run": runs / load.threads,
        "solve": _solving(load),
        "pack": load.seconds / 1e9 * load.weights / load.workers,
    }


def _solving(load: Load) -> float:
    """Return the seconds of calibrated solving of integers: a fixed part, and a part shared by threads."""
    if not load.tokens or load.kernel not in PASSES:
        return 0.0
    dense_passes, expert_passes = PASSES[load.kernel]
    fixed, shared = 0.0, 0.0
    for layer in load.layers:
        solved = [shape for shape in layer if shape[0] not in ENDS]
        sparse = any(role == "experts" for role, *_ in solved)
        fixed += EACH[load.kernel] * (1 if sparse else len(solved))
        passes = expert_passes if sparse else dense_passes
        for _, experts, rows, columns in solved:
            groups = math.ceil(experts / load.group)
            fixed += passes * SOLVER["column"] * columns * groups
            shared += passes * SOLVER["weight"] * experts * rows * columns + 2 * SOLVER["cube"] * experts * columns**3
    return fixed + shared / load.workers


def _activations(load: Load) -> int:
    """Return the bytes of the activations that two streams keep for a group of experts."""
    found = (
        2 * 4 * load.tokens * load.share * min(experts, load.group) * columns
        for role, experts, _, columns in load.shapes
        if role == "experts"
    )
    return int(min(max(found, default=0.0), MOST))


def job_memory(load: Load) -> int:
    """Return the memory of a job in bytes: the process, and the largest of its stages.

    The plan holds its sample, and the measurement of the sensitivity a block with gradients. Packing holds the codes of
    one tensor (one byte per weight), the experts being packed, and two packed layers, of which one is being written.
    With a text it also holds the layer in float32, the Hessians, the states of all tokens, and activations; states
    count even if they are in a file, which makes up for the temporaries of an expert's tokens.
    """
    if not load.shapes:
        return PROCESS
    codes = max(math.prod(shape[1:]) for shape in load.shapes)
    working = max(
        rows * columns * (WORKING * min(experts, load.workers) if experts > 1 else WHOLE)
        for _, experts, rows, columns in load.shapes
    )
    packing = codes + working + 2 * load.packed
    if load.tokens:
        squares = max(min(experts, load.group) * columns**2 for _, experts, _, columns in load.shapes)
        states = STATES * load.tokens * load.width
        packing += 4 * load.largest + states + HESSIAN * squares + _activations(load)
    plan = 0
    if load.method in PLAN:
        matrix = max(rows * columns for _, _, rows, columns in load.shapes)
        plan = SAMPLE_MEMORY * min(load.weights, SAMPLED) + MATRIX_MEMORY * matrix
    running = RUNNING + (BLOCKS if load.tokens else 0)
    return int(PROCESS + running + max(packing, plan, load.measuring if load.measured else 0))

"""Compares LoRA on packed experts and on bfloat16: memory, time and loss after equal steps.

    python -m benches.cpu.lora MODEL --train TEXT --held-out TEXT --json F [--steps 40] [--tokens 64] [--batch 4]

Both sides train the same adapters (rank 8 on the query and value projections) from the same seed on the same windows
with AdamW. Activations are bfloat16, adapters float32. Each side runs in its own process. `weights` are the bytes of
frozen weights, `peak` is the growth of the resident set from before loading to its peak in the last step, including
mapped pages, and `loss` is measured on windows of another text in nats per token, before the first step and after the
last.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benches.tools import machine

SIDES = ("bfloat16", "packed")


def status(name: str) -> int:
    """A line of the process's status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def windows(tokenizer: Any, text: str, tokens: int, count: int) -> Any:
    import torch

    ids = tokenizer(Path(text).read_text()[: 8 * tokens * count])["input_ids"]
    return torch.tensor(ids[: tokens * count]).view(count, tokens)


def loss_of(model: Any, held_out: Any) -> float:
    import torch

    with torch.no_grad():
        losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in held_out]
    return sum(losses) / len(losses)


def adapted(directory: str) -> Any:
    """The model of a directory, packed or not, with adapters."""
    import torch
    from peft import LoraConfig, get_peft_model

    from moepack.integrations.loading import open_model
    from moepack.integrations.lora import accept_packed

    torch.manual_seed(0)
    model = open_model(directory, torch.bfloat16)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=8, lora_alpha=16)
    return get_peft_model(model, accept_packed(config))


def side(options: argparse.Namespace) -> None:
    """Train one side and print its figures."""
    import peft  # noqa: F401  # in memory before it is measured
    import torch

    import moepack.integrations.lora  # noqa: F401
    from moepack.integrations.loading import open_tokenizer

    tokenizer = open_tokenizer(options.model)
    batches = windows(tokenizer, options.train, options.tokens, options.steps * options.batch)
    held_out = windows(tokenizer, options.held_out, 128, options.windows)
    before = status("VmRSS")
    model = adapted(options.directory)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    held = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    weights = sum(held.values()) - sum(parameter.nbytes for parameter in trained)
    losses = [loss_of(model.eval(), held_out)]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    start = time.perf_counter()
    for batch in batches.split(options.batch):
        model.train()(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = (time.perf_counter() - start) / options.steps
    peak = status("VmHWM") - before
    losses.append(loss_of(model.eval(), held_out))
    print(json.dumps({"weights": weights, "peak": peak, "seconds_a_step": round(seconds, 4), "loss": losses}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--train", required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--directory", help="run one side, with the model of this directory")
    for name, default in (("steps", 40), ("tokens", 64), ("batch", 4), ("bits", 4), ("windows", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.directory:
        return side(options)
    from moepack.methods.finequant import FineQuant
    from moepack.pipeline import compress

    with tempfile.TemporaryDirectory() as folder:
        packed = f"{folder}/packed"
        compress(options.model, packed, method=FineQuant(bits=options.bits, group_size=32, calibration=None))
        figures = {}
        for name, directory in zip(SIDES, (options.model, packed), strict=True):
            command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--directory", directory]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            figures[name] = json.loads(output.splitlines()[-1])
            print(name, figures[name])
    plain, ours = (figures[name] for name in SIDES)
    figures["ratios"] = {
        "weights": ours["weights"] / plain["weights"],
        "peak to bfloat16's weights": ours["peak"] / plain["weights"],
        "peak": ours["peak"] / plain["peak"],
        "loss": ours["loss"][-1] - plain["loss"][-1],
    }
    print(figures["ratios"])
    if options.json:
        settings = {name: getattr(options, name) for name in ("steps", "tokens", "batch", "bits", "windows")}
        machine.save(options.json, 1, settings | figures)


if __name__ == "__main__":
    main()

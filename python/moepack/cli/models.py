"""`moepack models`: try every architecture of the installed transformers."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from moepack.memory import importing

__all__ = ["models_command"]

EPILOG = "Each architecture is tried on a tiny random model, which takes 1 to 2 seconds. Nothing is downloaded."


def models_command(
    names: Annotated[list[str] | None, typer.Argument(help="Model types; default: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/models.md.")] = False,
) -> None:
    """Compress, load, run and export every architecture with routed experts.

    The exit code is 1 if the outputs of any architecture are wrong.
    """
    with importing():
        import transformers

        from moepack.census import architectures, check

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    chosen = [types for types in architectures() if not names or set(names) & set(types)]
    if missing := set(names or ()) - {name for types in architectures() for name in types}:
        raise typer.BadParameter(f"transformers has no experts in {', '.join(sorted(missing))}")
    outcomes = []
    for types in chosen:
        outcomes.append(check(types if not names else tuple(name for name in types if name in names)))
        if as_json:
            print(json.dumps(asdict(outcomes[-1])), flush=True)
        elif not markdown:
            print(_line(outcomes[-1]), flush=True)
    works = sum(outcome.works for outcome in outcomes)
    if markdown:
        print(_page(outcomes, works, transformers.__version__))
    elif not as_json:
        print(f"{works} of {len(outcomes)} architectures of transformers {transformers.__version__} work")
    if any(outcome.verdict == "fails" for outcome in outcomes):
        raise typer.Exit(1)


def _line(outcome: Any) -> str:
    errors = (outcome.original, outcome.exported, outcome.followed)
    figures = "".join(f"{error:.4f} " for error in errors if error is not None)
    decoded = f"decoded by {outcome.decoded} " if outcome.decoded else ""
    return f"{outcome.architecture:26} {outcome.verdict:15} {outcome.experts:10} {figures}{decoded}{outcome.reason}"


def _page(outcomes: list[Any], works: int, version: str) -> str:
    rows = [
        f"| `{each.architecture}` | {each.verdict} | {each.experts} | {'yes' if each.followed is not None else 'no'} "
        f"| {each.decoded or '-'} | {each.reason.replace('|', '/')} |"
        for each in outcomes
    ]
    core = sum(each.decoded == "core" for each in outcomes)
    followed = sum(each.followed is not None for each in outcomes)
    return _TEXT.format(
        works=works, count=len(outcomes), version=version, followed=followed, core=core, rows="\n".join(rows)
    )


_TEXT = """# Architectures
This page lists the architectures that moepack can compress and run, and what decodes them. moepack reads, packs and
runs {works} of the {count} architectures with routed experts of transformers {version}. `moepack models` prints the
table for your version of transformers; `moepack models --markdown` generates this page.

Each architecture is tested on a tiny random model of its own configuration class. The model is compressed to 8-bit
group-wise integers, loaded, run with and without a cache, used for generation if it can generate, exported to bf16 and
read back. The median relative error of a token's logits must stay below 5 % against the original and below 3 % against
the export. The test does not measure quality on real weights; for that, see [quality](quality.md).

Calibrated methods (`auto`, `rate`, `qmoe`, `codequant`, `milo`) need the inputs of each layer. They work with
{followed} architectures (column *calibrated*): run block by block, these compute the same hidden states as
transformers' own forward to within 0.1 %.

- *works*: experts and linear layers are packed.
- *text part only*: the language model is packed; image and audio towers are kept unchanged.
- *refused*: `compress` stops with an error before it reads a tensor.
- *not tried*: the installed transformers cannot build a tiny model of this architecture here.

Kinds of experts:

- *gated*: `down(act(gate x) * up x)`.
- *plain*: no gate.
- *own*: with clamps, biases or norms between and after the matrix multiplications, computed by transformers' own code.
- *every*: all experts get all tokens, scaled by the caller.
- *identity*: gated; indices beyond the last expert return the token unchanged.
- *product*: one matrix per expert.

On the CPU, moepack's decoder (in the Rust core) runs whole decoding steps of {core} architectures (`core` in the column
*decoded by*). transformers decodes the others and calls moepack's kernels for packed layers. `moepack doctor packed`
shows which applies, and why.

moepack reads tensors under the names that transformers loads. It also accepts the prefixes that training tools leave
(`module.`, `_orig_mod.`, `base_model.model.`, `model.language_model.`) and prints a note. Tensors that are not part of
the model have no effect and are listed.

Source checkpoints may be safetensors, PyTorch pickles or GGUF files, and may be quantized
([table](how-to.md#start-from-another-format)). They are decoded one matrix at a time. Compressing synthetic checkpoints
of two layers of 50 million weights (101 MB each in bf16) on one thread of a shared Zen 3 took at most 606 MB of
anonymous memory from fp8 and 590 MB from mxfp4. The guaranteed limit is 1 GiB + 4 times the largest layer, here
1,476 MB (`python -m benches.cpu.sources --experts 8`, benches/results/sources-zen3.json).

| architecture | verdict | experts | calibrated | decoded by | reason |
|---|---|---|---|---|---|
{rows}"""

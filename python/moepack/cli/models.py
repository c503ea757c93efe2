"""`moepack models`: which architectures of the installed transformers work, tried out."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

__all__ = ["models_command"]

EPILOG = "Each architecture is tried on a tiny random model, which takes a second or two; nothing is downloaded."


def models_command(
    names: Annotated[list[str] | None, typer.Argument(help="Model types, all by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/models.md.")] = False,
) -> None:
    """Compress, load, run and export every architecture with routed experts. Exit code 1 if one computes nonsense."""
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
moepack reads, packs and runs {works} of the {count} architectures with routed experts of transformers {version}.
`moepack models` makes this table for the transformers that is installed; `moepack models --markdown` made this page.

Each architecture is tried on a tiny random model of its own configuration class: compressed to group-wise integers of
8 bits, loaded, run with and without a cache, generated from where it can generate, exported to bf16 and read back. The
median error of a token's logits stays below 5 % beside the original and below 3 % beside the export. Real weights
and quality are another matter (docs/quality.md).

Methods that run the model over a text (`auto`, `rate`, `qmoe`, `codequant`, `milo`) need to see what each layer reads.
They do in {followed} architectures (column *calibrated*): run block by block, each computes the hidden states of
transformers' own forward to within 0.1 %.

- *works*: experts and linear layers are packed.
- *text part only*: so is the language model; towers for images and sound stay as they are.
- *refused*: `compress` says so before it reads a tensor.
- *not tried*: the installed transformers cannot build a tiny model of it here.

Experts are *gated* (`down(act(gate x) * up x)`), *plain* (no gate), *own* (clamps, biases or norms between and behind
the products, computed by transformers' own code), *every*, *identity* or *product*
(`moepack.checkpoint.experts` says what these are).

The core takes whole decoding steps of {core} architectures on the CPU (column *decoded by*); the others are decoded by
transformers, with moepack's products of layers. `moepack doctor packed` says which it is, and why.

moepack reads tensors under the names that transformers loads. It also reads the prefixes that training tools leave
(`module.`, `_orig_mod.`, `base_model.model.`, `model.language_model.`), and says so in a note. Tensors that the model
does not have are listed: they have no effect.

Sources may come quantized: fp8 with factors for blocks, rows, experts or tensors (`fp8`, `fbgemm_fp8`, `modelopt`,
`quark`, `compressed-tensors`), mxfp4, integers of 4 or 8 bits of compressed-tensors, gptq and awq of 4 bits. They are
decoded a matrix at a time. Compressing made-up checkpoints of two layers of 50 * 10^6
weights (101 MB each in bf16) on one thread of a shared Zen 3 took at most 606 MB of anonymous memory from fp8 and
590 MB from mxfp4; 1 GiB + 4 times the largest layer, 1,476 MB, is promised (`python benches/sources.py --experts 8`,
benches/results/sources-zen3.json).

| architecture | verdict | experts | calibrated | decoded by | reason |
|---|---|---|---|---|---|
{rows}"""

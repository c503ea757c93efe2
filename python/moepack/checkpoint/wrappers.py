"""Removes prefixes that training wrappers leave in tensor names.

Transformers loads names that lack the base model's prefix (`layers.0...` for `model.layers.0...`) or have it twice.
Training tools add more prefixes: `module.` (DistributedDataParallel), `base_model.model.` (peft),
`model.language_model.` (a language model extracted from a larger model), and `_orig_mod.` (torch.compile), also in the
middle of a name. All are removed when a checkpoint is opened, so that descriptions, plans and packed directories use
one spelling, and the packed directory loads independently of its source's names.

A prefix counts as a wrapper only if the model's own names are missing and exactly one prefix hides them: without it, a
name must be a parameter of the model by transformers' own rules. If two prefixes hide the same parameters (a teacher
and its student), the checkpoint is rejected. A prefix known from training may apply to only some names, as in shards
saved by different programs.
"""

from collections.abc import Collection, Iterator, Mapping

from moepack.checkpoint.architectures import ARCHITECTURES
from moepack.checkpoint.classes import meta_model
from moepack.checkpoint.names import Rules
from moepack.checkpoint.reader import Checkpoint
from moepack.errors import CheckpointError

__all__ = ["unwrapped"]

INNER = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attributes of torch wrappers that hold the wrapped module: compilation, FSDP, and activation checkpointing."""

TRAINERS = frozenset({"module", "base_model"})
"""First components of the prefixes of data parallelism and peft. No part of a model has these names."""

DEPTH = 6
"""Maximum number of components of a prefix."""


def unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the tensor names of the model's class. No tensor is read.

    A checkpoint whose model cannot be built is returned unchanged; `describe` reports the error.

    Raises:
        CheckpointError: several prefixes hide the same parameters, or two tensors get the same name.
    """
    plain = {name: _without_inner(name) for name in checkpoint.names()}
    if _is_as_described(checkpoint.config, plain):
        return checkpoint
    try:
        rules = Rules(meta_model(checkpoint.path, checkpoint.config))
    except Exception:  # model classes raise arbitrary exceptions for unexpected config values
        return checkpoint
    found, prefix = _found(checkpoint, rules, [*plain.values()])
    beginnings = _beginnings(found)
    renamed = {name: found.get(short) or _like(short, beginnings) for name, short in plain.items()}
    if all(name == other for name, other in renamed.items()):
        return checkpoint
    _refuse_repeated(checkpoint, renamed)
    return checkpoint.renamed(renamed, (*checkpoint.notes, *_note(plain, prefix)))


def _without_inner(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in INNER)


def _is_as_described(config: Mapping[str, object], plain: Mapping[str, str]) -> bool:
    """Return whether the names match the architecture's description. No model is built."""
    architecture = ARCHITECTURES.get(str(config.get("model_type")))
    if architecture is None or any(name != short for name, short in plain.items()):
        return False
    ends = {architecture.embeddings, architecture.last_norm}
    if not config.get("tie_word_embeddings"):
        ends.add(architecture.head)
    stacks = tuple(f"{stack}." for stack in architecture.stacks)
    others = (name for name in plain if name not in ends and name != architecture.head)
    return (
        ends <= plain.keys()
        and all(name.startswith(stacks) for name in others)
        and all(any(name.startswith(f"{stack}0.") for name in plain) for stack in stacks)
    )


def _found(checkpoint: Checkpoint, rules: Rules, names: list[str]) -> tuple[dict[str, str], str]:
    """Return the tensors that become parameters, mapped to the names of the model's class, and the wrapper's prefix."""
    direct = {name: targets for name in names if (targets := _hits(rules, name))}
    taken: set[str] = set().union(*direct.values())
    missing = set(rules.needed) - taken
    found = {name: _spelled(rules, name) for name in direct}
    others = [name for name in names if name not in direct]
    prefix = _wrapper(checkpoint, rules, others, missing, len(direct)) if missing else ""
    outer = prefix.split(".") if prefix else []
    for count in range(len(outer), 0, -1):
        start = ".".join(outer[:count]) + "."
        hidden = {name: name.removeprefix(start) for name in others if name.startswith(start) and name not in found}
        hits = {
            name: targets for name, rest in hidden.items() if (targets := _hits(rules, rest)) and not targets & taken
        }
        found |= {name: _spelled(rules, hidden[name]) for name in hits}
        taken.update(*hits.values())
    return found, prefix


def _hits(rules: Rules, name: str) -> set[str]:
    """Return the parameters that a tensor of this name becomes."""
    return {target for target, _ in rules.targets(name) if target in rules.parameters}


def _spelled(rules: Rules, name: str) -> str:
    """Return a name with the base model's prefix added or removed to match the model's class."""
    target = rules.target(name)
    spellings = (name, f"{rules.prefix}.{name}", name.removeprefix(f"{rules.prefix}."))
    return next((each for each in spellings if rules.target(each, prefixed=False) == target), name)


def _wrapper(checkpoint: Checkpoint, rules: Rules, names: Collection[str], missing: set[str], direct: int) -> str:
    """Return the prefix that hides most of the missing parameters, or an empty string.

    A prefix qualifies if it is known from training, or if it hides more parameters than are found without a prefix.
    """
    hidden: dict[str, set[str]] = {}
    for name in names:
        for prefix in _prefixes(name):
            if hits := _hits(rules, name.removeprefix(f"{prefix}.")) & missing:
                hidden.setdefault(prefix, set()).update(hits)
    if not hidden:
        return ""
    best = max(hidden, key=lambda prefix: (len(hidden[prefix]), len(prefix)))
    if len(hidden[best]) <= direct and best.partition(".")[0] not in TRAINERS:
        return ""
    for prefix, hits in hidden.items():
        related = f"{best}.".startswith(f"{prefix}.") or f"{prefix}.".startswith(f"{best}.")
        if not related and 2 * len(hits & hidden[best]) > len(hidden[best]):
            message = (
                f"holds the model twice, under '{prefix}.' and under '{best}.'; keep the tensors of one of them, "
                "without that prefix"
            )
            raise CheckpointError(message, file=checkpoint.path)
    return best


def _prefixes(name: str) -> Iterator[str]:
    """Yield the possible wrapper prefixes of a name: its first components, up to the first number."""
    parts = name.split(".")
    for count in range(1, min(len(parts), DEPTH + 1)):
        if parts[count - 1].isdigit():
            return
        yield ".".join(parts[:count])


def _beginnings(found: Mapping[str, str]) -> dict[str, str]:
    """Return the shortest prefixes with their replacements, from names whose renaming is known."""
    beginnings: dict[str, str] = {}
    for name, spelled in found.items():
        old, new = name.split("."), spelled.split(".")
        same = next((i for i, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b), None)
        kept = (min(len(old), len(new)) if same is None else same) - 1
        if kept >= 0:
            beginnings.setdefault(".".join(old[: len(old) - kept]), ".".join(new[: len(new) - kept]))
    return beginnings


def _like(name: str, beginnings: Mapping[str, str]) -> str:
    """Rename a tensor that becomes no parameter (codes of a quantized weight, an extra layer) like its neighbours."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if (new := beginnings.get(".".join(parts[:count]))) is not None:
            return ".".join((new, *parts[count:]))
    return name


def _refuse_repeated(checkpoint: Checkpoint, renamed: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    for name, other in renamed.items():
        if other in seen:
            message = f"is stored twice, as '{seen[other]}' and as '{name}'"
            raise CheckpointError(message, file=checkpoint.path, tensor=other)
        seen[other] = name


def _note(plain: Mapping[str, str], prefix: str) -> tuple[str, ...]:
    """Return the note for the user on removed prefixes. Prefixes that transformers handles itself are not mentioned."""
    inner = sorted({part for name in plain for part in name.split(".") if part in INNER})
    hidden = [f"'{each}.'" for each in (*inner, *([prefix] if prefix else []))]
    if not hidden:
        return ()
    what = " and ".join(hidden)
    return (f"Tensor names contain {what} of a training wrapper; they are read without it.",)

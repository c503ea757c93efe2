"""Names of tensors as the model's class spells them, whatever wrapped the model when it was saved.

Transformers loads names that lack the base model's prefix (`layers.0...` for `model.layers.0...`) or have it twice.
Training leaves more in front of names: `module.` (DistributedDataParallel), `base_model.model.` (peft),
`model.language_model.` (a language model taken out of a larger one), `_orig_mod.` (torch.compile), the last one also in
the middle. All of it goes when a checkpoint is opened, so that descriptions, plans and packed directories know one
spelling, and the packed directory loads whatever its source was called.

A prefix is taken for a wrapper only if the model's own names are not there and exactly one prefix hides them: the rest
of a name is then a parameter of the model by transformers' own rules. Where two prefixes hide the same parameters (a
teacher and its student), the checkpoint is refused. A prefix that is known from training may be in front of some names
alone, as in shards that were saved by different programs.
"""

from collections.abc import Collection, Iterator, Mapping

from moepack.checkpoint.architectures import ARCHITECTURES
from moepack.checkpoint.classes import meta_model
from moepack.checkpoint.names import Rules
from moepack.checkpoint.reader import Checkpoint
from moepack.errors import CheckpointError

__all__ = ["unwrapped"]

INNER = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attributes in which torch keeps a module that it wraps: for compilation, FSDP, and checkpoints of activations."""

TRAINERS = frozenset({"module", "base_model"})
"""How prefixes begin that data parallelism and peft put in front of names: no part of a model is called so."""

DEPTH = 6
"""The most components of a prefix."""


def unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its tensors under the names that the model's class gives them; no tensor is read.

    A checkpoint whose model cannot be built comes back as it is: whoever describes it says why.

    Raises:
        CheckpointError: several prefixes hide the same parameters, or two tensors get the same name.
    """
    plain = {name: _without_inner(name) for name in checkpoint.names()}
    if _is_as_described(checkpoint.config, plain):
        return checkpoint
    try:
        rules = Rules(meta_model(checkpoint.path, checkpoint.config))
    except Exception:  # whatever a class of transformers makes of values that it does not expect
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
    """Whether names match the architecture's description. No model is built to find out."""
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
    """Names of tensors that become parameters, with the names that the model's class gives them; and what hid them."""
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
    """The parameters that a tensor of this name becomes."""
    return {target for target, _ in rules.targets(name) if target in rules.parameters}


def _spelled(rules: Rules, name: str) -> str:
    """A name with the base model's prefix as the model's class has it, where transformers adds or drops it."""
    target = rules.target(name)
    spellings = (name, f"{rules.prefix}.{name}", name.removeprefix(f"{rules.prefix}."))
    return next((each for each in spellings if rules.target(each, prefixed=False) == target), name)


def _wrapper(checkpoint: Checkpoint, rules: Rules, names: Collection[str], missing: set[str], direct: int) -> str:
    """The prefix that hides most of the missing parameters; empty if none that is known from training hides any, and
    none at all hides more than are found without one."""
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
    """What may be a wrapper in front of a name: its first components, up to the first number."""
    parts = name.split(".")
    for count in range(1, min(len(parts), DEPTH + 1)):
        if parts[count - 1].isdigit():
            return
        yield ".".join(parts[:count])


def _beginnings(found: Mapping[str, str]) -> dict[str, str]:
    """How names begin and what that becomes, from names whose renaming is known; as short as tells them apart."""
    beginnings: dict[str, str] = {}
    for name, spelled in found.items():
        old, new = name.split("."), spelled.split(".")
        same = next((i for i, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b), None)
        kept = (min(len(old), len(new)) if same is None else same) - 1
        if kept >= 0:
            beginnings.setdefault(".".join(old[: len(old) - kept]), ".".join(new[: len(new) - kept]))
    return beginnings


def _like(name: str, beginnings: Mapping[str, str]) -> str:
    """The name of a tensor that becomes no parameter (codes of a quantized weight, a layer too many), renamed as its
    neighbours are."""
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
    """What a user should know: nothing of what transformers does itself."""
    inner = sorted({part for name in plain for part in name.split(".") if part in INNER})
    hidden = [f"'{each}.'" for each in (*inner, *([prefix] if prefix else []))]
    if not hidden:
        return ()
    what = " and ".join(hidden)
    return (f"Names of tensors contain {what} of what wrapped the model when it was saved; they are read without it.",)

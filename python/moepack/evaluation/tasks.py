"""Runs lm-eval tasks (EleutherAI's harness) on packed and unpacked models, through its Python API.

Tasks are lm-eval's own, with data from the Hub, or YAML files in a folder, which may name local data.
"""

import logging
from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any
from unittest.mock import patch

from moepack.decoding.carried import carried_of
from moepack.decoding.finite import watching
from moepack.decoding.vocabulary import naming
from moepack.errors import LoadError
from moepack.integrations.loading import open_model, open_tokenizer

__all__ = ["evaluate_tasks"]


def evaluate_tasks(
    directory: str | PathLike[str],
    tasks: Sequence[str],
    task_path: str | PathLike[str] | None = None,
    *,
    shots: int | None = None,
    limit: int | None = None,
    batch: int = 1,
    **options: Any,
) -> dict[str, dict[str, float]]:
    """Evaluate a model on tasks.

    Args:
        directory: a model directory or Hub id.
        tasks: names of tasks, groups or patterns (`mmlu_*`).
        task_path: a folder with YAML task files, in addition to lm-eval's own.
        shots: few-shot examples per question; None uses the task's default.
        limit: maximum questions per task; None runs all.
        batch: batch size. It is 1 if rotary frequencies depend on the length of a sequence.
        options: fields of `LoadOptions`: dtype, mode, threads and so on.

    Returns:
        The measures of each task by name, such as `acc` and `acc_stderr`.

    Raises:
        LoadError: lm-eval is not installed, a model cannot be loaded, or a task's data are not available.
        NonFiniteError: the model's logits are not finite; the message names the layer.
        TokenError: the model's embedding has no row for a token of a question.
        ValueError: unknown task.
    """
    try:
        from lm_eval import evaluator
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise LoadError("tasks need lm-eval: pip install 'moepack[eval]'") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _manager(tasks, None if task_path is None else fspath(task_path))
    model = open_model(directory, **options)
    tokenizer = open_tokenizer(directory)
    if carried_of(model).limit is not None:  # a batch would use the frequencies of its longest question
        batch = 1
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)
    settings = {"num_fewshot": shots, "limit": limit, "task_manager": manager, "log_samples": False}
    try:
        # lm-eval records the commit of the working directory in a field that is not used here. Outside a repository,
        # git would print an error to the terminal.
        quiet = patch.object(evaluator, "get_git_commit_hash", lambda: None, create=True)
        with quiet, naming(tokenizer), watching(model):
            found = evaluator.simple_evaluate(harness, tasks=manager.match_tasks(list(tasks)), **settings)
    except (OSError, ConnectionError) as error:
        reason = " ".join(str(error).split())
        raise LoadError(f"the data of the tasks cannot be loaded: {reason}", file=directory) from error
    assert found is not None
    return {task: _measures(figures) for task, figures in found["results"].items()}


def _manager(tasks: Sequence[str], folder: str | None) -> Any:
    """Return lm-eval's task manager for the tasks.

    Raises:
        ValueError: unknown task.
    """
    from lm_eval.tasks import TaskManager

    # Indexing lm-eval's thousands of tasks takes seconds, which tasks of the folder do not need.
    manager = TaskManager(include_path=folder, include_defaults=folder is None)
    if folder is not None and not all(manager.match_tasks([name]) for name in tasks):
        manager = TaskManager(include_path=folder)
    if missing := [name for name in tasks if not manager.match_tasks([name])]:
        raise ValueError(f"there is no task '{missing[0]}' in lm-eval" + ("" if folder is None else f" or {folder}"))
    return manager


def _measures(figures: dict[str, Any]) -> dict[str, float]:
    """Return the measures of a task, without the suffix that lm-eval adds for the filter "none"."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in figures.items()
        if isinstance(value, int | float) and "," in name
    }

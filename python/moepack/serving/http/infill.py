"""Prompts that ask a model for the text between a prefix and a suffix (fill in the middle).

Models are trained for this with control tokens of their own, so a tokenizer without them cannot be asked. Invariant:
nothing in the texts of a client becomes a control token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moepack.serving.http.refusal import Refusal
from moepack.serving.text.prompts import text_ids

__all__ = ["File", "infill_ids"]

_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
"""The tokens before the prefix, before the suffix, and before the answer, in this order."""
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")
"""Codestral: the tokens before the suffix and before the prefix. The answer follows the prefix."""
_FILES = (("<|file_sep|>", "<|repo_name|>"), ("<file_sep>", "<repo_name>"))
"""The tokens before a file and before the name of a repository."""
_ENDS = ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<file_sep>", "<repo_name>", "▁<EOT>")
"""Tokens that end an answer."""


@dataclass(frozen=True)
class File:
    """Another file that the model may read."""

    name: str
    text: str


def infill_ids(
    tokenizer: Any, prefix: str, suffix: str, params: tuple[str, str], files: Sequence[File] = ()
) -> tuple[list[int], list[int]]:
    """Return the token ids of the prompt, and the ids of tokens that end an answer.

    Args:
        tokenizer: the tokenizer of the model.
        prefix, suffix: the texts before and after the answer.
        params: the names of the fields with the suffix and with the files.
        files: other files.

    Raises:
        Refusal: the tokenizer lacks the tokens.
        ValueError: the tokenizer cannot read a text.
    """
    start = tokenizer("").input_ids
    ids = start if start == [tokenizer.bos_token_id] else []
    ids = ids + _file_ids(tokenizer, files, params[1])
    prefix_ids, suffix_ids = text_ids(tokenizer, prefix), text_ids(tokenizer, suffix)
    ends = [token for name in _ENDS if (token := _token(tokenizer, name)) is not None]
    for form in _FORMS:
        marks = [token for name in form if (token := _token(tokenizer, name)) is not None]
        if len(marks) == len(form):
            return [*ids, marks[0], *prefix_ids, marks[1], *suffix_ids, marks[2]], ends
    marks = [token for name in _SUFFIX_FIRST if (token := _token(tokenizer, name)) is not None]
    if len(marks) == len(_SUFFIX_FIRST):
        return [*ids, marks[0], *suffix_ids, marks[1], *prefix_ids], ends
    message = f"the model's tokenizer has no tokens to fill in the middle, so {params[0]} is not supported"
    raise Refusal(400, message, "unsupported_parameter", param=params[0])


def _file_ids(tokenizer: Any, files: Sequence[File], param: str) -> list[int]:
    if not files:
        return []
    for names in _FILES:
        separator, repository = (_token(tokenizer, name) for name in names)
        if separator is None:
            continue
        ids = [] if repository is None else [repository, *text_ids(tokenizer, "repository\n")]
        for file in files:
            ids += [separator, *text_ids(tokenizer, f"{file.name}\n{file.text}")]
        return [*ids, separator]
    message = f"the model's tokenizer has no token that separates files, so {param} is not supported"
    raise Refusal(400, message, "unsupported_parameter", param=param)


def _token(tokenizer: Any, name: str) -> int | None:
    """Return the id of a token; None if the tokenizer lacks it."""
    token = tokenizer.convert_tokens_to_ids(name)
    return token if isinstance(token, int) and tokenizer.convert_ids_to_tokens(token) == name else None

"""Writes the vocabulary of a tokenizer for llama.cpp: byte-level BPE or SentencePiece BPE (`pieces`).

A tokenizer with a pre-tokenizer that llama.cpp does not support (`splits`) would give different tokens and is rejected.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moepack.errors import UnsupportedModelError
from moepack.export.gguf.pieces import are_pieces, begins_with_space, scores
from moepack.export.gguf.splits import name_of
from moepack.textfile import read_text

__all__ = ["Vocabulary"]


class Vocabulary:
    """The vocabulary of `tokenizer.json` and `tokenizer_config.json`.

    Args:
        directory: directory of the files.
        size: rows of the embedding. Rows without a token are written as unused tokens.

    Raises:
        UnsupportedModelError: there is no tokenizer, or llama.cpp would give different tokens.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self._file = directory / "tokenizer.json"
        if not self._file.is_file():
            raise UnsupportedModelError("missing; llama.cpp needs a tokenizer", file=self._file)
        self._content: dict[str, Any] = json.loads(self._file.read_bytes())
        config = directory / "tokenizer_config.json"
        self._config: dict[str, Any] = json.loads(config.read_bytes()) if config.is_file() else {}
        self._model: dict[str, Any] = self._content["model"]
        self._size = size
        if self._model["type"] != "BPE":
            raise self._refused(f"the model {self._model['type']}")
        if not self._model["merges"]:
            raise self._refused("no merges, which llama.cpp needs")
        for setting in ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"):
            if self._model.get(setting):
                raise self._refused(f"{setting} {self._model[setting]!r}")
        self._pieces = are_pieces(self._content)
        self._split = "default" if self._pieces else self._rule(self._content.get("pre_tokenizer") or {})

    def write(self, gguf: Any, writer: Any) -> None:
        """Write tokens, merges and special tokens."""
        tokens, types = self._tokens(gguf.TokenType)
        merges = self._merges()
        if self._pieces:
            order = scores(tokens, merges)
            if order is None:
                raise self._refused("merges that no order of pieces reproduces")
            writer.add_tokenizer_model("llama")
            writer.add_token_scores(order)
            writer.add_add_space_prefix(begins_with_space(self._content))
        else:
            writer.add_tokenizer_model("gpt2")
            writer.add_token_merges([" ".join(merge) for merge in merges])
        writer.add_tokenizer_pre(self._split)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        numbers = {token: number for number, token in enumerate(tokens)}
        for name in ("bos", "eos", "unk", "pad"):
            token = self._config.get(f"{name}_token")
            token = token.get("content") if isinstance(token, Mapping) else token
            if token in numbers:
                getattr(writer, f"add_{name}_token_id")(numbers[token])
        writer.add_add_bos_token(self._adds("bos_token"))
        writer.add_add_eos_token(self._adds("eos_token"))
        template = self._file.with_name("chat_template.jinja")
        found = read_text(template) if template.is_file() else self._config.get("chat_template")
        if isinstance(found, str):
            writer.add_chat_template(found)

    def _tokens(self, kinds: Any) -> tuple[list[str], list[int]]:
        """Return all tokens in order of their ids, and the type of each."""
        named = {number: (token, int(kinds.NORMAL)) for token, number in self._model["vocab"].items()}
        for added in self._content.get("added_tokens", []):
            kind = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
            named[added["id"]] = added["content"], int(kind)
        if max(named) >= self._size:
            raise self._refused(f"{max(named) + 1} tokens, but the model has {self._size}")
        if self._pieces:
            for value in range(256):
                number = self._model["vocab"].get(f"<0x{value:02X}>")
                if number is None:
                    raise self._refused(f"no token for the byte {value}")
                named[number] = f"<0x{value:02X}>", int(kinds.BYTE)
        unknown = self._model["vocab"].get(self._model.get("unk_token"))
        if unknown is not None:
            named[unknown] = self._model["unk_token"], int(kinds.UNKNOWN)
        found = [named.get(number, (f"[PAD{number}]", int(kinds.UNUSED))) for number in range(self._size)]
        return [token for token, _ in found], [kind for _, kind in found]

    def _rule(self, rule: Mapping[str, Any]) -> str:
        """Return llama.cpp's name of the pre-tokenizer."""
        if self._content.get("normalizer") not in (None, {"type": "NFC"}):
            raise self._refused(f"the normalizer {self._content['normalizer']}")
        parts = rule["pretokenizers"] if rule.get("type") == "Sequence" else [rule]
        if any(part.get("add_prefix_space") for part in parts):
            raise self._refused("a space before the text")
        name = name_of(rule, self._merges())
        if name is None:
            raise self._refused("a pre-tokenizer that llama.cpp is not known to support")
        return name

    def _merges(self) -> list[Sequence[str]]:
        """Return the merges in order. Older files store each as one string."""
        return [merge.split(" ") if isinstance(merge, str) else merge for merge in self._model["merges"]]

    def _adds(self, name: str) -> bool:
        """Return whether the tokenizer's template adds this special token to each text."""
        token = self._config.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        after = self._content.get("post_processor") or {}
        templates = [part for part in after.get("processors", [after]) if part.get("type") == "TemplateProcessing"]
        pieces = [piece for template in templates for piece in template["single"]]
        return any(piece.get("SpecialToken", {}).get("id") == token for piece in pieces)

    def _refused(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"llama.cpp would tokenize differently: the tokenizer has {what}", file=self._file)

"""The vocabulary of a tokenizer, as llama.cpp reads it: byte-level BPE, or pieces of sentences (`pieces`).

llama.cpp finds the rule by which byte-level BPE splits text into words under a name, not in the file. A tokenizer that
splits by a rule that is not among `_SPLITS` would read the same text as other tokens, and is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moepack.errors import UnsupportedModelError
from moepack.export.gguf.pieces import are_pieces, begins_with_space, scores

__all__ = ["Vocabulary"]

_GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
_QWEN2 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
_SPLITS = {_GPT2: "gpt-2", _QWEN2: "qwen2"}
"""Rules by the expression that splits, each with llama.cpp's name."""


class Vocabulary:
    """What a directory's `tokenizer.json` and `tokenizer_config.json` say.

    Args:
        directory: where they lie.
        size: rows of the embedding; tokens beyond the tokenizer's are written as unused.

    Raises:
        UnsupportedModelError: there is no tokenizer, or llama.cpp would read text as other tokens.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self._file = directory / "tokenizer.json"
        if not self._file.is_file():
            raise UnsupportedModelError("llama.cpp needs a tokenizer, and there is none", file=self._file)
        self._content: dict[str, Any] = json.loads(self._file.read_bytes())
        config = directory / "tokenizer_config.json"
        self._config: dict[str, Any] = json.loads(config.read_bytes()) if config.is_file() else {}
        self._model: dict[str, Any] = self._content["model"]
        self._size = size
        if self._model["type"] != "BPE":
            raise self._refused(f"the model {self._model['type']}")
        if not self._model["merges"]:
            raise self._refused("no merges, and llama.cpp needs some")
        for setting in ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"):
            if self._model.get(setting):
                raise self._refused(f"{setting} {self._model[setting]!r}")
        self._pieces = are_pieces(self._content)
        self._split = "default" if self._pieces else self._rule(self._content.get("pre_tokenizer") or {})

    def write(self, gguf: Any, writer: Any) -> None:
        """Write tokens, merges and special tokens."""
        tokens, types = self._tokens(gguf.TokenType)
        merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in self._model["merges"]]
        if self._pieces:
            order = scores(tokens, merges)
            if order is None:
                raise self._refused("merges that are no order of pieces")
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
        found = template.read_text("utf-8") if template.is_file() else self._config.get("chat_template")
        if isinstance(found, str):
            writer.add_chat_template(found)

    def _tokens(self, kinds: Any) -> tuple[list[str], list[int]]:
        """All tokens by their numbers, and what kind each is."""
        named = {number: (token, int(kinds.NORMAL)) for token, number in self._model["vocab"].items()}
        for added in self._content.get("added_tokens", []):
            kind = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
            named[added["id"]] = added["content"], int(kind)
        if max(named) >= self._size:
            raise self._refused(f"{max(named) + 1} tokens, where the model has {self._size}")
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
        """llama.cpp's name of the rule that splits text."""
        if self._content.get("normalizer") not in (None, {"type": "NFC"}):
            raise self._refused(f"the normalizer {self._content['normalizer']}")
        parts = rule["pretokenizers"] if rule.get("type") == "Sequence" else [rule]
        if any(part.get("add_prefix_space") for part in parts):
            raise self._refused("a space before the text")
        expressions = [part["pattern"].get("Regex") for part in parts if part.get("type") == "Split"]
        expressions += [_GPT2 for part in parts if part.get("type") == "ByteLevel" and part.get("use_regex", True)]
        kinds = {part.get("type") for part in parts}
        if kinds <= {"Split", "ByteLevel"} and "ByteLevel" in kinds and len(expressions) == 1:
            (expression,) = expressions
            if expression in _SPLITS:
                return _SPLITS[expression]
        raise self._refused("a rule that splits text and that llama.cpp is not known to have")

    def _adds(self, name: str) -> bool:
        """Whether a special token is put around each text, as the tokenizer's template says."""
        token = self._config.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        after = self._content.get("post_processor") or {}
        templates = [part for part in after.get("processors", [after]) if part.get("type") == "TemplateProcessing"]
        pieces = [piece for template in templates for piece in template["single"]]
        return any(piece.get("SpecialToken", {}).get("id") == token for piece in pieces)

    def _refused(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"llama.cpp would read text otherwise: the tokenizer has {what}", file=self._file)

"""The pre-tokenizers of byte-level BPE that llama.cpp supports.

A GGUF file names a pre-tokenizer; llama.cpp has its regular expressions built in. In tokenizer.json, `pre_tokenizer`
lists one or several expressions that are applied in turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["name_of"]

_GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
_QWEN2 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-"
    "ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-"
    "ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_EAST_ASIAN = "[一-龥ࠀ-一가-\ud7ff]+"
_DIGIT = "\\p{N}"
_NAMES: Mapping[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2",
    (_QWEN2,): "qwen2",
    (
        "[\\r\\n]",
        f"\\s?[{_LETTERS}]+",
        "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        "\\s+$",
        _EAST_ASIAN,
        _DIGIT,
    ): "deepseek-llm",
    ("[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", _EAST_ASIAN, _DIGIT): "deepseek-coder",
}


def name_of(rule: Mapping[str, Any], merges: Sequence[Sequence[str]]) -> str | None:
    """Return llama.cpp's name of a pre-tokenizer, or None if it has no known counterpart.

    Args:
        rule: `pre_tokenizer` of tokenizer.json, which ends with `ByteLevel`.
        merges: merges of the tokenizer. llama.cpp's `deepseek-llm` does not split digits, so no merge may join them.
    """
    parts = rule["pretokenizers"] if rule.get("type") == "Sequence" else [rule]
    expressions = [_expression(part) for part in parts]
    if not parts or parts[-1].get("type") != "ByteLevel" or None in expressions:
        return None
    known = _NAMES.get(tuple(expression for expression in expressions if expression))
    if known == "deepseek-llm" and any("".join(merge).isdigit() for merge in merges):
        return None
    return known


def _expression(part: Mapping[str, Any]) -> str | None:
    """Return the regular expression of a part; empty if it does not split, None for an unsupported part."""
    match part:
        case {"type": "Split", "pattern": {"Regex": str(expression)}, "behavior": "Isolated", "invert": False}:
            return expression.replace("\r", "\\r").replace("\n", "\\n")
        case {"type": "Digits", "individual_digits": True}:
            return _DIGIT
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return _GPT2 if part.get("use_regex", True) else ""
    return None

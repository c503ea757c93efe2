"""Rules by which byte-level BPE splits text into words, as far as llama.cpp has them.

llama.cpp finds such a rule under a name, not in the file; a tokenizer's own rule is one or several expressions that
take turns (`pre_tokenizer` of tokenizer.json).
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
    """Return llama.cpp's name of a tokenizer's rule, or None where it is not known to have it.

    Args:
        rule: `pre_tokenizer` of tokenizer.json, which ends with bytes (`ByteLevel`).
        merges: the tokenizer's. llama.cpp's `deepseek-llm` keeps digits together, so none may join them.
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
    """The expression that a part splits by; empty where it splits nothing, None for parts of another kind."""
    match part:
        case {"type": "Split", "pattern": {"Regex": str(expression)}, "behavior": "Isolated", "invert": False}:
            return expression.replace("\r", "\\r").replace("\n", "\\n")
        case {"type": "Digits", "individual_digits": True}:
            return _DIGIT
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return _GPT2 if part.get("use_regex", True) else ""
    return None

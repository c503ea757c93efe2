"""Grammars of answers, in llguidance's Lark syntax: JSON, regular expressions, choices, and calls of functions.

A model may reason before the part that is constrained. In harmony, the constrained part is the body of the message to
the user, or to a function.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from moepack.serving.chat.calls import TAGGED, Tools
from moepack.serving.chat.formats import Format

__all__ = ["calls", "choice", "from_grammar", "json_schema", "plain", "regex", "shaped", "text_or_calls"]

SPACE = "( |\\n[ \\t]{0,20})?"
"""White space in JSON: a space, or a line break and an indent. Without a bound, small models write spaces forever."""

_TEXT = "TEXT: /(?s:.*)/\nWS: /[ \\n]{0,4}/\n"


def json_schema(schema: Any) -> str:
    """Return the rule `body` for JSON that a schema describes; `True` describes any value."""
    return f"body: %json {_schema(schema)}\n"


def regex(pattern: str) -> str:
    """Return the rule `body` for text that a regular expression matches as a whole.

    Raises:
        ValueError: the expression has a line break, which the syntax lacks.
    """
    if "\n" in pattern:
        raise ValueError("must have line breaks as \\n")
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", pattern)
    return f"body: BODY\nBODY: /{escaped}/\n"


def choice(texts: Sequence[str]) -> str:
    """Return the rule `body` for one of several texts."""
    return f"body: {' | '.join(map(_quoted, texts))}\n"


def from_grammar(grammar: str) -> str:
    """Return the rule `body` for a grammar in Lark or GBNF.

    Raises:
        ValueError: GBNF that cannot be converted.
    """
    if "::=" in grammar:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            grammar = any_to_lark(grammar)
        except Exception as error:
            raise ValueError(f"is not valid GBNF: {error}") from error
    return re.sub(r"(?m)^(\s*[?!]?)start\b", r"\1body", grammar) + "\n"


def plain(body: str) -> str:
    """Return the grammar of an answer that is only its body."""
    return f"start: body\n{body}"


def shaped(
    body: str, form: Format, added: Iterable[tuple[str, int]], is_reasoning: bool, tools: Tools = (),
    several: bool = True,
) -> str:  # fmt: skip
    """Return the grammar of a chat's answer with a body, or with calls if there are tools.

    Args:
        body: the rule `body`.
        form: the format of the answer.
        added: control tokens with their ids.
        is_reasoning: the answer starts inside reasoning.
        tools: functions that may be called instead.
        several: more than one call is allowed.
    """
    spell, before = _Spelling(added), ""
    if form.is_harmony:
        before = f"{spell('<|channel|>final')} ({spell(' <|constrain|>')} /[a-z]+/)? {spell('<|message|>')}"
    called, rules = (" | called", _call_rules(tools, form, spell, several)) if tools else ("", "")
    return f"start: {_thoughts(form, spell, is_reasoning)} ({before} body{called})\n{_TEXT}{body}{rules}"


def calls(
    tools: Tools, form: Format, added: Iterable[tuple[str, int]], is_reasoning: bool, several: bool = True
) -> str:
    """Return the grammar of an answer that calls at least one function, or exactly one."""
    spell = _Spelling(added)
    rules = _call_rules(tools, form, spell, several)
    return f"start: {_thoughts(form, spell, is_reasoning)} called\n{_TEXT}{rules}"


def text_or_calls(
    tools: Tools, form: Format, added: Iterable[tuple[str, int]], is_reasoning: bool, several: bool = True
) -> str:
    """Return the grammar of an answer that may call functions, with the arguments that they declare."""
    spell = _Spelling(added)
    rules = _call_rules(tools, form, spell, several)
    final = f"{spell('<|channel|>final<|message|>')} TEXT | called" if form.is_harmony else "FREE called?"
    opens = re.escape(form.calls.opens if form.calls else TAGGED.opens).replace("/", "\\/")
    free = f"FREE: /(?s:.*)/ & ~/(?s:.*){opens}(?s:.*)/\n"
    return f"start: {_thoughts(form, spell, is_reasoning)} ({final})\n{_TEXT}{free}{rules}"


def _thoughts(form: Format, spell: "_Spelling", is_reasoning: bool) -> str:
    """Return what may precede the constrained part."""
    if form.is_harmony:
        if not spell.is_token("<|message|>"):
            return ""
        return f"({spell('<|channel|>analysis<|message|>')} TEXT {spell('<|end|><|start|>assistant')})*"
    if form.thoughts is None or not all(map(spell.is_token, form.thoughts)):
        return ""
    opens, closes = map(spell, form.thoughts)
    return f"TEXT {closes} WS" if is_reasoning else f"({opens} TEXT {closes} WS)?"


def _call_rules(tools: Tools, form: Format, spell: "_Spelling", several: bool) -> str:
    """Return the rule `called` for calls in the format's syntax."""
    rules, names = [], []
    syntax = form.calls or TAGGED
    for number, tool in enumerate(tools):
        name, parameters = tool["function"]["name"], tool["function"].get("parameters")
        if form.is_harmony:
            before, after = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""
        else:
            before, after = syntax.frame(name)
        rules.append(f"arguments_{number}: %json {_schema(parameters or {'type': 'object'})}\n")
        names.append(f"{spell(before)} arguments_{number} {spell(after)}")
    one = " | ".join(f"({name})" for name in names)
    many = "one" if form.is_harmony or not several else f"one ({spell(syntax.between)} one)*"
    begins, ends = ("", "") if form.is_harmony else (spell(syntax.begins), spell(syntax.ends))
    return f"called: {begins} {many} {ends}\none: {one}\n{''.join(rules)}"


class _Spelling:
    """Writes literal text as terms of a grammar: control tokens by their ids, other text in quotes."""

    def __init__(self, added: Iterable[tuple[str, int]]) -> None:
        self._ids = dict(added)
        tokens = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, tokens)) + ")") if tokens else None

    def is_token(self, text: str) -> bool:
        """Return whether a text is one control token."""
        return text in self._ids

    def __call__(self, text: str) -> str:
        parts = self._pattern.split(text) if self._pattern else [text]
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else _quoted(part) for part in parts if part)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(schema: Any) -> str:
    """Return a JSON schema with bounded white space, unless it sets its own."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": SPACE, **schema.get("x-guidance", {})}}
    return json.dumps(schema)

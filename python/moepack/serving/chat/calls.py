"""Calls of functions as models write them: one parser per syntax.

A parser takes the text between the marks of a syntax and returns the calls in it. Invariant: text that is not a call in
that syntax raises `ValueError`; the caller then treats it as content.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Call", "ObjectReader", "Syntax", "Tools", "syntax_of"]

Tools = Sequence[Mapping[str, Any]]
"""Functions in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


@dataclass(frozen=True)
class Call:
    """A call of a function: its name, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Syntax:
    """How a family writes calls.

    Attributes:
        opens: the mark before calls; a chat template that contains it uses this syntax.
        closes: the mark after calls; empty if calls end with the answer.
        parse: returns the calls between the marks.
        frame: returns the text before and after the arguments of a call of a function, as JSON. Its parser reads this,
            even if the family writes arguments otherwise.
        begins, ends: text before the first and after the last call.
        between: text between two calls.
        starts: matches the text of a call up to its arguments, an object, with the name as group 1; None if arguments
            are read only as a whole.
    """

    opens: str
    closes: str
    parse: Callable[[str, Tools], list[Call]]
    frame: Callable[[str], tuple[str, str]]
    begins: str = ""
    ends: str = ""
    between: str = ""
    starts: re.Pattern[str] | None = None


class ObjectReader:
    """Finds the end of a JSON object in text that arrives in pieces.

    Attributes:
        has_ended: whether the object has ended.
    """

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped, self.has_ended = 0, False, False, False

    def take(self, text: str) -> int:
        """Return how many of the next characters belong to the object."""
        for place, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.has_ended = True
                    return place + 1
        return len(text)


def _tagged(text: str, tools: Tools) -> list[Call]:
    """Parse the body of `<tool_call>`: JSON (Hermes, Qwen3), XML (Qwen3-Coder) or keys and values (GLM)."""
    text = text.strip()
    if text.startswith("{"):
        return [_from_json(text)]
    if text.startswith("<function="):
        return [_from_xml(text, tools)]
    name, mark, rest = text.partition("<arg_key>")
    if not mark and name.strip() not in {tool["function"]["name"] for tool in tools}:
        raise ValueError("a call without arguments has the name of a function")
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", f"<arg_key>{rest}", re.DOTALL)
    return [_from_texts(name.strip(), pairs, tools)]


def _from_json(text: str) -> Call:
    content = json.loads(text)
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        raise ValueError("a call is an object with a name")
    return Call(content["name"], _as_json(content.get("arguments", content.get("parameters", {}))))


def _from_xml(text: str, tools: Tools) -> Call:
    name, _, body = text.removeprefix("<function=").partition(">")
    pairs = re.findall(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
    return _from_texts(name.strip(), pairs, tools)


def _from_texts(name: str, pairs: Iterable[tuple[str, str]], tools: Tools) -> Call:
    """Return a call from arguments that are texts; all but strings are JSON."""
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError("a call has a name")
    types = _types(name, tools)
    return Call(name, _as_json({key: _value(value, types.get(key)) for key, value in pairs}))


def _types(name: str, tools: Tools) -> dict[str, Any]:
    """Return the types of a function's parameters, by name."""
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: schema.get("type") for key, schema in properties.items() if isinstance(schema, dict)}
    return {}


def _value(text: str, kind: Any) -> Any:
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _deepseek(text: str, tools: Tools) -> list[Call]:
    """Parse DeepSeek's calls: `function`, name and fenced JSON (V3, R1), or name and JSON (V3.1)."""
    calls = []
    for body in re.findall(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", text, re.DOTALL):
        first, mark, rest = body.partition("<｜tool▁sep｜>")
        if not mark:
            raise ValueError("a call has a name and arguments")
        fenced = re.fullmatch(r"\s*([^\n]+)\n```json\n(.*?)\n?```\s*", rest, re.DOTALL)
        name, arguments = fenced.groups() if fenced else (first, rest)
        calls.append(Call(name.strip(), _checked(arguments)))
    return _some(calls)


def _dsml(text: str, tools: Tools) -> list[Call]:
    """Parse the calls of DeepSeek V3.2: arguments as elements, or as one JSON object."""
    calls = []
    for name, body in re.findall(r'<｜DSML｜invoke name="([^"]*)">(.*?)</｜DSML｜invoke>', text, re.DOTALL):
        if body.strip().startswith("{"):
            calls.append(Call(name, _checked(body)))
            continue
        found = re.findall(
            r'<｜DSML｜parameter name="([^"]*)"(?: string="(true|false)")?>(.*?)</｜DSML｜parameter>', body, re.DOTALL
        )
        values = {key: value if is_string == "true" else _value(value, None) for key, is_string, value in found}
        calls.append(Call(name, _as_json(values)))
    return _some(calls)


def _mistral(text: str, tools: Tools) -> list[Call]:
    """Parse Mistral's calls: a JSON list, or names with `[ARGS]` and JSON."""
    text = text.strip()
    if text.startswith("["):
        return _some([_from_json(json.dumps(entry)) for entry in json.loads(text)])
    calls = []
    for body in text.split("[TOOL_CALLS]"):
        name, _, arguments = body.partition("[ARGS]")
        if not arguments:
            name, _, arguments = body.partition("{")
            arguments = "{" + arguments
        calls.append(Call(name.partition("[CALL_ID]")[0].strip(), _checked(arguments)))
    return _some(calls)


def _checked(arguments: str) -> str:
    """Return the text of a JSON object."""
    if not isinstance(json.loads(arguments), dict):
        raise ValueError("arguments are an object")
    return arguments.strip()


def _some(calls: list[Call]) -> list[Call]:
    if not calls or not all(call.name for call in calls):
        raise ValueError("there is no call")
    return calls


TAGGED = Syntax(
    "<tool_call>",
    "</tool_call>",
    _tagged,
    lambda name: (f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ', "}\n</tool_call>"),
    between="\n",
    starts=re.compile(r'\s*\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'),
)
DEEPSEEK = Syntax(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    _deepseek,
    lambda name: (f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    begins="<｜tool▁calls▁begin｜>",
    ends="<｜tool▁calls▁end｜>",
)
DEEPSEEK_FENCED = Syntax(
    DEEPSEEK.opens,
    DEEPSEEK.closes,
    _deepseek,
    lambda name: (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
    ),
    begins=DEEPSEEK.begins,
    ends=DEEPSEEK.ends,
    between="\n",
)
DSML = Syntax(
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    _dsml,
    lambda name: (f'<｜DSML｜invoke name="{name}">\n', "\n</｜DSML｜invoke>"),
    begins="<｜DSML｜function_calls>\n",
    ends="\n</｜DSML｜function_calls>",
    between="\n",
)
MISTRAL = Syntax(
    "[TOOL_CALLS]",
    "",
    _mistral,
    lambda name: (f"[TOOL_CALLS]{name}[ARGS]", ""),
)
MISTRAL_LIST = Syntax(
    "[TOOL_CALLS]",
    "",
    _mistral,
    lambda name: (f'{{"name": {json.dumps(name)}, "arguments": ', "}"),
    begins="[TOOL_CALLS][",
    ends="]",
    between=", ",
)


def syntax_of(template: str) -> Syntax | None:
    """Return the syntax of the calls that a chat template writes; None if it is unknown."""
    if DSML.opens in template or "DSML｜" in template:
        return DSML
    if DEEPSEEK.opens in template:
        return DEEPSEEK_FENCED if "```json" in template else DEEPSEEK
    if MISTRAL.opens in template:
        return MISTRAL if "[ARGS]" in template else MISTRAL_LIST
    return TAGGED if TAGGED.opens in template else None

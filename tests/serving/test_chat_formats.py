"""What models write is split into reasoning, content and calls, in the formats of several families."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moepack.serving.chat.calls import syntax_of
from moepack.serving.chat.formats import format_of
from moepack.serving.chat.reader import Marks, Reader

TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {
        "place": {"type": "string"}, "days": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "stop"}},
]  # fmt: skip
LOOK, STOP = ("look", {"place": "12", "days": 3}), ("stop", {})
QWEN = "<tool_call> <think> </think>"
DEEPSEEK = "<｜tool▁calls▁begin｜> <think> </think>"
HARMONY = "<|channel|> <|message|>"

ANSWERS = {
    "text": (QWEN, "", "Hello  there\n", ("", "Hello  there\n", [])),
    "thought": (QWEN, "", "<think>\nhm\n</think>\n\nHello", ("hm", "Hello", [])),
    "begun thought": (QWEN, "<think>\n", "hm\n</think>\n\nHello ", ("hm", "Hello ", [])),
    "unfinished thought": (QWEN, "<think>\n", "hm\n", ("hm", "", [])),
    "a later mark is text": (QWEN, "", "a <think> b", ("", "a <think> b", [])),
    "qwen": (QWEN, "", '<think>\nI look\n</think>\n\nI see.\n<tool_call>\n{"name": "look", "arguments": '
             '{"place": "12", "days": 3}}\n</tool_call>\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
             ("I look", "I see.", [LOOK, STOP])),
    "arguments as text": (QWEN, "", '<tool_call>{"name": "look", "arguments": "{\\"place\\": \\"12\\", \\"days\\": 3}"}'
                          "</tool_call>", ("", "", [LOOK])),
    "a mark of a call in a string": (QWEN, "", 'x <tool_cal <tool_call>{"name": "look", "arguments": {"place": "<"}}'
                                     "</tool_call>", ("", "x <tool_cal", [("look", {"place": "<"})])),
    "an unclosed call": (QWEN, "", '<tool_call>\n{"name": "stop", "arguments": {}}\n', ("", "", [STOP])),
    "marks and braces in strings": (
        QWEN, "", '<tool_call>{"name": "look", "arguments": {"place": "\\"}</tool_call>{[", "days": [3, {}]}}'
        "</tool_call>",
        ("", "", [("look", {"place": '"}</tool_call>{[', "days": [3, {}]})])),
    "keys behind the arguments": (QWEN, "", 'a<tool_call>{"name": "stop", "arguments": {}, "id": 1}</tool_call>',
                                  ("", "a", [STOP])),
    "keys before the name": (QWEN, "", '<tool_call>{"id": 1, "name": "stop", "arguments": {}}</tool_call>',
                             ("", "", [STOP])),
    "text in a call": (QWEN, "", '<tool_call>{"name": "stop", "arguments": {}} then</tool_call>', ("", "then", [STOP])),
    "no call": (QWEN, "", "<tool_call>what</tool_call> then", ("", "<tool_call>what</tool_call>then", [])),
    "coder": (QWEN, "", "<tool_call>\n<function=look>\n<parameter=place>\n12\n</parameter>\n<parameter=days>\n3\n"
              "</parameter>\n</function>\n</tool_call>", ("", "", [LOOK])),
    "glm": (QWEN, "", "<think>a</think>\n<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>12</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", ("a", "", [LOOK])),
    "deepseek": (DEEPSEEK, "<think>\n", "a</think>b<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
                 'look\n```json\n{"place": "12", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
                 "<｜tool▁sep｜>stop\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                 ("a", "b", [LOOK, STOP])),
    "deepseek 3.1": (DEEPSEEK, "", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
                     '{"place": "12", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', ("", "", [LOOK])),
    "deepseek 3.2": ("<｜DSML｜function_calls>", "", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n'
                     '<｜DSML｜parameter name="place" string="true">12</｜DSML｜parameter>\n'
                     '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
                     "</｜DSML｜function_calls>", ("", "", [LOOK])),
    "mistral": ("[TOOL_CALLS] [THINK] [/THINK]", "", '[THINK]a[/THINK]b[TOOL_CALLS][{"name": "look", "arguments": '
                '{"place": "12", "days": 3}}, {"name": "stop", "arguments": {}}]', ("a", "b", [LOOK, STOP])),
    "mistral 11": ("[TOOL_CALLS][ARGS]", "", '[TOOL_CALLS]look[CALL_ID]abc[ARGS]{"place": "12", "days": 3}'
                   "[TOOL_CALLS]stop[ARGS]{}", ("", "", [LOOK, STOP])),
    "harmony": (HARMONY, "", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary "
                'to=functions.look <|constrain|>json<|message|>{"place": "12", "days": 3}<|call|>', ("a", "", [LOOK])),
    "harmony text": (HARMONY, "", "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>final"
                     "<|message|>c <| d", ("a < b", "c <| d", [])),
    "harmony, to first": (HARMONY, "", " to=functions.stop<|channel|>commentary<|message|>{}", ("", "", [STOP])),
}  # fmt: skip
"""Text of a template, the end of the prompt, an answer, and its reasoning, content and calls."""


def read(template, prompt, pieces, tools=TOOLS):
    reader = format_of(template).reader(prompt, tools)
    deltas = [delta for piece in pieces for delta in reader.put(piece)] + reader.end()
    calls = {}
    for delta in deltas:
        assert bool(delta.content) + bool(delta.reasoning) + (delta.call is not None) == 1
        if delta.call is not None:
            name, arguments, number = calls.get(delta.call.index, (None, "", None))
            assert (name is None) == (delta.call.name is not None)
            calls[delta.call.index] = (
                delta.call.name or name,
                arguments + delta.call.arguments,
                delta.call.id or number,
            )
    assert reader.count == len(calls) and len({number for *_, number in calls.values()}) == len(calls)
    found = [(name, json.loads(arguments)) for name, arguments, _ in calls.values()]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas), found


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_split_alike_in_any_pieces(name):
    template, prompt, text, expected = ANSWERS[name]
    assert read(template, prompt, [text]) == expected
    assert read(template, prompt, list(text)) == expected
    for place in range(len(text)):
        assert read(template, prompt, [text[:place], text[place:]]) == expected


def test_arguments_are_passed_on_as_they_are_written():
    text = '<tool_call>\n{"name": "look", "arguments": {"place": "12", "days": 3}}\n</tool_call>'
    reader, seen = format_of(QWEN).reader("", TOOLS), ""
    for character in text:
        seen += character
        parts = [delta.call for delta in reader.put(character)]
        if "{" in seen[12:].partition('"arguments": ')[2] and "3}" not in seen[:-1]:
            assert parts and parts[-1].arguments == character
        else:
            assert not parts
    assert reader.end() == []


def test_a_call_in_which_the_answer_ends_is_a_part_of_a_call():
    reader = format_of(QWEN).reader("", TOOLS)
    text = 'I look.<tool_call>\n{"name": "look", "arguments": {"place": "1'
    deltas = [*reader.put(text), *reader.end()]
    assert [delta.content for delta in deltas] == ["I look.", "", ""] and reader.count == 1
    assert (deltas[1].call.name, deltas[2].call.arguments) == ("look", '{"place": "1')


@pytest.mark.parametrize("name", [name for name in ANSWERS if "harmony" not in name])
def test_without_tools_calls_are_content(name):
    template, prompt, text, (reasoning, content, calls) = ANSWERS[name]
    found = read(template, prompt, list(text), ())
    assert found[0] == reasoning and found[2] == []
    assert found[1].startswith(content.split("then")[0]) and (not calls or calls[0][0] in found[1])


MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_", "{", '"name"', "\n", " ", "a", "<"]


@given(st.lists(st.sampled_from(MARKS), max_size=12), st.booleans())
def test_no_text_is_lost(parts, reasons):
    """Marks and white space beside them aside, every character of an answer is in a part of it."""
    text = "".join(parts)
    reasoning, content, calls = read(QWEN, "<think>" if reasons else "", parts)
    kept = lambda text: text.replace("<think>", "").replace("</think>", "").replace("\n", "").replace(" ", "")  # noqa: E731
    assert not calls and kept(reasoning + content) == kept(text)


@given(st.text(), st.integers(1, 5))
def test_a_model_without_marks_writes_content_alone(text, size):
    reader = Reader(Marks())
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    deltas = [reader.put(piece) for piece in pieces]
    assert ["".join(delta.content for delta in some) for some in deltas] == pieces and not reader.end()


def test_a_template_without_calls_has_no_syntax():
    assert syntax_of("{{ messages }}") is None and not format_of("{{ messages }}").has_calls

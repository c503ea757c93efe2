"""Grammars of answers accept what families write, with their control tokens, and nothing else."""

import json

import pytest

pytest.importorskip("llguidance")

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moepack.errors import MoepackError
from moepack.serving.chat import grammar
from moepack.serving.chat.formats import format_of
from moepack.serving.constraint import Grammars

CONTROLS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>"),
    *("<|constrain|>", "<|start|>", "<|end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
]
QWEN = format_of("<tool_call> <think> </think>")
HARMONY = format_of("<|channel|> <|message|>")
DEEPSEEK = format_of("<｜tool▁calls▁begin｜> <think> </think>")
MISTRAL = format_of("[TOOL_CALLS][ARGS]")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]
JSON = grammar.json_schema(SCHEMA)


@pytest.fixture(scope="module")
def tokenizer():
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"]
    made = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    made.add_tokens([AddedToken(word, special="|" in word, normalized=False) for word in CONTROLS])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


@pytest.fixture(scope="module")
def accepts(tokenizer):
    """A function that returns whether a grammar accepts a text, token by token."""
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])

    def accepts(lark, text):
        state = grammars.compiled(lark)
        try:
            for token in tokenizer(text, add_special_tokens=False).input_ids:
                if state.is_complete or not state.allowed()[token]:
                    return False
                state.take(token)
        except MoepackError:
            return False
        return state.is_complete or bool(state.allowed()[tokenizer.eos_token_id])

    return accepts


@pytest.fixture(scope="module")
def added(tokenizer):
    return [(token.content, number) for number, token in tokenizer.added_tokens_decoder.items()]


def call(name, arguments='{"a": 1}'):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def spoken(name, arguments='{"a": 1}'):
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("form", "is_reasoning", "good", "bad"),
    [
        (QWEN, False, ['{"a": 1}', '<think>hm {"</think>\n\n{"a": 1}'], ['{"a": "x"}', "x", '<think>hm{"a": 1}']),
        (QWEN, True, ['hm</think>\n\n{"a": 1}'], ['{"a": 1}', '<think>{"a": 1}']),
        (HARMONY, False, ['<|channel|>final<|message|>{"a": 1}', THOUGHT + '<|channel|>final<|message|>{"a": 1}',
                          '<|channel|>final <|constrain|>json<|message|>{"a": 1}'],
         ['{"a": 1}', '<|channel|>final<|message|>x', THOUGHT]),
    ],
    ids=["qwen", "begun", "harmony"],
)  # fmt: skip
def test_schemas_after_reasoning(accepts, added, form, is_reasoning, good, bad):
    lark = grammar.shaped(JSON, form, added, is_reasoning)
    assert all(accepts(lark, text) for text in good) and not any(accepts(lark, text) for text in bad)


CASES = {
    "qwen": (QWEN, [call("f"), call("f") + "\n" + call("g"), "<think>hm</think>\n\n" + call("g")],
             ["x", call("h"), call("f", "{}"), call("f") + "x"]),
    "harmony": (HARMONY, [spoken("f"), THOUGHT + spoken("g")], [spoken("h"), "<|channel|>final<|message|>x"]),
    "deepseek": (DEEPSEEK, ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>" + '{"a": 1}' +
                            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"], ["<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"]),
    "mistral": (MISTRAL, ['[TOOL_CALLS]f[ARGS]{"a": 1}', '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"a": 2}'],
                ["[TOOL_CALLS]f[ARGS]{}"]),
}  # fmt: skip


@pytest.mark.parametrize("family", CASES)
def test_required_calls(accepts, added, family):
    form, good, bad = CASES[family]
    lark = grammar.calls(TOOLS, form, added, False)
    assert [text for text in good if not accepts(lark, text)] == []
    assert [text for text in bad if accepts(lark, text)] == []
    for text in good:
        reader = form.reader("", TOOLS)
        deltas = [*reader.put(text), *reader.end()]
        assert reader.count and not any(delta.content for delta in deltas)
        for index in range(reader.count):
            arguments = "".join(d.call.arguments for d in deltas if d.call and d.call.index == index)
            assert json.loads(arguments)["a"] in (1, 2)


@pytest.mark.parametrize("family", CASES)
def test_text_or_calls(accepts, added, family):
    form, good, bad = CASES[family]
    lark = grammar.text_or_calls(TOOLS, form, added, False)
    text = "<|channel|>final<|message|>I am < it" if form is HARMONY else "I am < it"
    assert accepts(lark, text) and accepts(lark, good[0])
    assert form is HARMONY or accepts(lark, f"{text}\n{good[0]}")
    assert not any(
        accepts(lark, wrong) for wrong in bad if wrong[:1] in "<[" and "final" not in wrong and "x" not in wrong
    )


def test_one_call_at_most(accepts, added):
    lark = grammar.calls(TOOLS, QWEN, added, False, several=False)
    assert accepts(lark, call("f")) and not accepts(lark, call("f") + "\n" + call("g"))


@pytest.mark.parametrize(
    ("body", "good", "bad"),
    [
        (grammar.regex("[a/]+"), ["a/a"], ["", "b"]),
        (grammar.regex(r"\d\/\\"), ["5/\\"], ["5/"]),
        (grammar.choice(['a"b', "é\n"]), ['a"b', "é\n"], ["a"]),
        (grammar.from_grammar("start: a\na: /x+/"), ["xx"], ["y"]),
        (grammar.from_grammar('root ::= item+\nitem ::= "a" | [0-9]'), ["a5a"], ["b"]),
    ],
    ids=["slash", "escapes", "choice", "lark", "gbnf"],
)
def test_bodies(accepts, body, good, bad):
    lark = grammar.plain(body)
    assert all(accepts(lark, text) for text in good) and not any(accepts(lark, text) for text in bad)

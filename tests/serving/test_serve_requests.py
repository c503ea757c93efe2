"""Request fields: each is honoured or rejected by name, and every failure has OpenAI's form."""

import json
from typing import get_type_hints

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moepack.serving.text.generation import generate
from moepack.serving.text.sampling import Sampling
from places import ROOT

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from openai.types import completion_create_params as completion_params  # noqa: E402
from openai.types.chat import completion_create_params as chat_params  # noqa: E402
from openai.types.chat.chat_completion import ChatCompletion  # noqa: E402

from moepack.serving.http.openai_chat import ChatRequest  # noqa: E402
from moepack.serving.http.openai_completions import CompletionRequest  # noqa: E402
from request_support import CHATS, COMPLETIONS, chat, completion  # noqa: E402

HARMLESS = {"user", "metadata", "safety_identifier", "prompt_cache_key", "cache_prompt", "request_id",
            "guided_decoding_backend"}  # fmt: skip
SAMPLED = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.25, "typical_p": 0.75, "repetition_penalty": 1.5,
           "presence_penalty": 0.5, "frequency_penalty": -0.5, "min_tokens": 1, "ignore_eos": True,
           "seed": 7}  # fmt: skip
"""A value of each sampling field that changes answers."""
REFUSED = [
    *("mirostat", "bad_words", "allowed_token_ids", "use_beam_search", "length_penalty", "samplers", "chat_template"),
    *("logits_processors", "prompt_logprobs", "truncate_prompt_tokens", "priority", "documents", "mm_processor_kwargs"),
    *("skip_special_tokens", "top_n_sigma", "xtc_probability", "cache_salt", "guided_whitespace_pattern"),
    *("lora", "id_slot", "functions", "function_call", "modalities", "store", "suffix", "audio", "prediction"),
]
"""Fields of OpenAI, vLLM and llama.cpp that are not supported."""


def asks_for_nothing(path, name, value):
    value = int(value) if isinstance(value, float) and value.is_integer() else value  # as the body is read
    neutral = kinds[path].neutral.get(name, ())
    return value is None or any(type(value) is type(same) and value == same for same in neutral)


# Random requests

texts = st.text(st.characters(exclude_categories=()), max_size=5) | st.sampled_from(["x", "\ud800", "a\udfff", "\0"])
numbers = st.integers() | st.integers(-2, 5) | st.floats() | st.sampled_from([1e-320, 1e-9, 1e308, 10**400, 2.0, -0.0])
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
kinds = {COMPLETIONS: CompletionRequest, CHATS: ChatRequest}
parts = st.fixed_dictionaries({"type": st.just("text"), "text": texts}, optional={"cache_control": values}) | values
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]), "content": texts | st.lists(parts)},
    optional={name: values for name in ("name", "tool_calls", "function_call", "refusal", "audio", "tool_call_id")},
)


@st.composite
def requests(draw):
    path = draw(st.sampled_from([COMPLETIONS, CHATS]))
    body = completion() if path == COMPLETIONS else chat()
    likely = {"messages": st.lists(messages, max_size=3), "max_tokens": st.integers(1, 3),
              "stream_options": st.dictionaries(st.sampled_from(["include_usage", "x"]), values)}  # fmt: skip
    names = (
        st.sampled_from(sorted(kinds[path].model_fields)) | st.sampled_from([*kinds[path].neutral, *REFUSED]) | texts
    )
    for name in draw(st.lists(names, max_size=3)):
        neutral = st.sampled_from(kinds[path].neutral.get(name, (None,)))
        body[name] = draw(likely.get(name, neutral) | neutral | scalars | values)
    return path, body


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(request=requests())
@example(request=(COMPLETIONS, completion(length_penalty=1.0)))
def test_any_request_gets_a_well_formed_answer_and_no_field_is_ignored(ask, request):
    path, body = request
    status, headers, content = ask(path, body)
    assert status in (200, 400, 404), (body, content)
    if status == 200:
        assert all(
            name in kinds[path].model_fields or asks_for_nothing(path, name, value) for name, value in body.items()
        )
        assert headers["content-type"].startswith("text/event-stream" if body.get("stream") else "application/json")


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=40) | st.builds(lambda *cut: json.dumps(completion()).encode()[slice(*cut)],
                                               st.integers(0, 50), st.integers(0, 50)))  # fmt: skip
def test_any_bytes_get_a_well_formed_answer(ask, data):
    assert ask(COMPLETIONS, data, method="POST")[0] in (200, 400)


# Fields


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_fields_of_all_clients_are_honoured_harmless_or_refused_by_name(ask, path):
    module = completion_params if path == COMPLETIONS else chat_params
    names = {
        *get_type_hints(module.CompletionCreateParamsNonStreaming),
        *REFUSED,
        *kinds[path].neutral,
        "surprise",
        "",
        "a b",
    }
    body = completion() if path == COMPLETIONS else chat()
    for name in sorted(names - set(kinds[path].model_fields)):
        for value in (3, "x", {"a": 1}, [1], 1.5):
            status, _, content = ask(path, {**body, name: value})
            assert (status, content["error"]["param"]) == (400, name), (name, value)
            assert content["error"]["message"] == f"{name} is not supported"


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, completion()), (CHATS, chat())])
def test_values_that_ask_for_nothing_and_harmless_fields_change_nothing(ask, path, body):
    plain = ask(path, {**body, "temperature": 0})[2]["choices"]
    neutral = {name: same for name, values in kinds[path].neutral.items() for same in values if name != "max_tokens"}
    harmless = {"user": "x", "metadata": {"a": 1}, "safety_identifier": "y", "prompt_cache_key": "z",
                "cache_prompt": False, "request_id": "r", "guided_decoding_backend": "xgrammar"}  # fmt: skip
    neutral |= {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "stop_token_ids": [],
                "min_tokens": 0, "ignore_eos": False, "typical_p": 1, "min_p": 0, "repetition_penalty": 1,
                "stop": []}  # fmt: skip
    if path == CHATS:
        neutral |= {"chat_template_kwargs": {}, "add_generation_prompt": True, "continue_final_message": False,
                    "tool_choice": "auto", "parallel_tool_calls": False, "tools": [], "logprobs": False,
                    "response_format": {"type": "text"}}  # fmt: skip
    null = dict.fromkeys([*neutral, *harmless, "surprise", "stop", "seed", "stream", "stream_options"])
    for more in (neutral, harmless, null, {"n": 1.0}, {"stream_options": {"include_obfuscation": False, "x": None}}):
        assert ask(path, {**body, "temperature": 0, **more})[2]["choices"] == plain


def test_no_tokens_are_not_the_empty_text(ask, engine, monkeypatch):
    call = type(engine.tokenizer).__call__
    monkeypatch.setattr(type(engine.tokenizer), "__call__", lambda self, text: call(self, "<s>" + text))
    assert ask(COMPLETIONS, completion(prompt=""))[0] == 200
    assert ask(COMPLETIONS, completion(prompt=[]))[2]["error"]["message"] == "the prompt has no tokens"


def test_zero_is_not_false_nor_true_one(ask):
    for name, value in (("n", True), ("presence_penalty", False), ("echo", 0), ("logprobs", True)):
        assert ask(COMPLETIONS, completion(**{name: value}))[2]["error"]["param"] == name


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].function"),
        ({"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[]"}}]},
         "messages[0].tool_calls[0].function.arguments"),
        ({"tool_calls": [{"id": "1", "type": "custom", "function": {"name": "f"}}]}, "messages[0].tool_calls[0].type"),
        ({"tool_calls": [{"id": "1", "function": {"name": "f"}}]}, "messages[0].tool_calls"),
        ({"role": "user", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}, "messages[0].tool_calls"),
        ({"function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"name": "Ann"}, "messages[0].name"),
        ({"refusal": "no"}, "messages[0].refusal"),
        ({"audio": {"id": "a"}}, "messages[0].audio"),
        ({"tool_call_id": "1"}, "messages[0].tool_call_id"),
        ({"reasoning_content": "hm"}, "messages[0].reasoning_content"),
        ({"surprise": 1}, "messages[0].surprise"),
        ({"role": "user", "reasoning_content": "hm"}, "messages[0].reasoning_content"),
        ({"role": "function"}, "messages[0].role"),
        ({"role": 1}, "messages[0].role"),
        ({"content": None}, "messages[0].content"),
        ({"content": 5}, "messages[0].content"),
        ({"content": []}, "messages[0].content"),
        ({"content": ["x"]}, "messages[0].content[0]"),
        ({"content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
        ({"content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
         "messages[0].content[0].cache_control"),
        ({"content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:"}}]},
         "messages[0].content[1].type"),
        ({"content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]},
         "messages[0].content[0].type"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_fields_of_messages_are_honoured_or_refused_by_name(ask, more, param):
    status, _, content = ask(CHATS, chat({"role": "assistant", "content": "x", **more}))
    assert (status, content["error"]["param"]) == (400, param)
    assert content["error"]["message"].startswith(param + " ")


def test_an_answer_may_be_sent_back_as_it_was_received(ask):
    said = ChatCompletion.model_validate(ask(CHATS, chat())[2]).choices[0].message.model_dump()
    assert said["tool_calls"] is None
    messages = [{"role": "user", "content": "x"}, {**said, "tool_calls": [], "annotations": []}]
    assert ask(CHATS, chat(messages=messages))[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "code", "sentence"),
    [
        (COMPLETIONS, {"prompt": "x"}, "model", "missing_required_parameter", "is required"),
        (COMPLETIONS, {"model": "tiny"}, "prompt", "missing_required_parameter", "is required"),
        (COMPLETIONS, completion(model=5), "model", "invalid_type", "must be a string"),
        (COMPLETIONS, completion(prompt=5), "prompt", "invalid_value", "must be a string, a list of tokens, or a list"),
        (COMPLETIONS, completion(prompt=[True]), "prompt", "invalid_value", "must be a string, a list of tokens"),
        (COMPLETIONS, completion(prompt=[[1], []]), "prompt", "invalid_value", "must be a string, a list of tokens"),
        (COMPLETIONS, completion(n=2, best_of=1), "best_of", "invalid_value", "must be at least n"),
        (COMPLETIONS, completion(best_of=2, stream=True), "best_of", "invalid_value", "must equal n in a stream"),
        (COMPLETIONS, completion(n=129), "n", "invalid_value", "must be at most 128"),
        (COMPLETIONS, completion(logprobs=21), "logprobs", "invalid_value", "must be at most 20"),
        (COMPLETIONS, completion(logit_bias={"x": 1}), "logit_bias", "invalid_value", "must have token ids as names"),
        (COMPLETIONS, completion(logit_bias={"5": 101}), "logit_bias", "invalid_value", "must have values from -100"),
        (COMPLETIONS, completion(logit_bias={"285": 1}), "logit_bias", "invalid_value", "has the token 285"),
        (COMPLETIONS, completion(stop_token_ids=[285]), "stop_token_ids", "invalid_value", "has the token 285"),
        (COMPLETIONS, completion(stop_token_ids=[-1]), "stop_token_ids", "invalid_value", "must have token ids"),
        (COMPLETIONS, completion(min_tokens=2), "min_tokens", "invalid_value", "must be at most the length"),
        (COMPLETIONS, completion(typical_p=0), "typical_p", "invalid_value", "must be above 0"),
        (COMPLETIONS, completion(presence_penalty=3), "presence_penalty", "invalid_value", "must be at most 2"),
        (COMPLETIONS, completion(guided_regex="("), "guided_regex", "invalid_grammar", "is not valid: "),
        (COMPLETIONS, completion(guided_regex="a", guided_choice=["b"]), "guided_choice", "invalid_value",
         "cannot be combined with guided_regex"),
        (COMPLETIONS, completion(guided_json="{"), "guided_json", "invalid_value", "is not JSON"),
        (COMPLETIONS, completion(guided_json={"type": "objec"}), "guided_json", "invalid_grammar", "is not valid: "),
        (COMPLETIONS, completion(grammar="root ::= ("), "grammar", "invalid_value", "is not valid GBNF"),
        (CHATS, chat(response_format={"type": "json_schema"}), "response_format.json_schema",
         "missing_required_parameter", "is required"),
        (CHATS, chat(response_format={"type": "xml"}), "response_format.type", "invalid_value", "must be 'text',"),
        (CHATS, chat(top_logprobs=2), "top_logprobs", "invalid_value", "requires logprobs"),
        (CHATS, chat(tool_choice="some"), "tool_choice", "invalid_value", "must be 'auto', 'none', 'required'"),
        (CHATS, chat(tool_choice="required"), "tool_choice", "invalid_value", "is 'required', but there are no tools"),
        (CHATS, chat(chat_template_kwargs={"enable_thinking": False}), "chat_template_kwargs.enable_thinking",
         "invalid_value", "is not supported"),
        (CHATS, chat(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs.tokenize", "invalid_value",
         "is not a variable"),
        (CHATS, chat(continue_final_message=True), "continue_final_message", "invalid_value", "requires a last"),
        (COMPLETIONS, completion(max_tokens=0), "max_tokens", "invalid_value", "must be at least 1"),
        (COMPLETIONS, completion(max_tokens=True), "max_tokens", "invalid_type", "must be an integer"),
        (COMPLETIONS, completion(max_tokens=1.5), "max_tokens", "invalid_type", "must be an integer"),
        (COMPLETIONS, completion(max_tokens="1"), "max_tokens", "invalid_type", "must be an integer"),
        (COMPLETIONS, completion(temperature=-1), "temperature", "invalid_value", "must be at least 0"),
        (COMPLETIONS, completion(temperature=1e300), "temperature", "invalid_value", "must be at most 100"),
        (COMPLETIONS, completion(temperature="1"), "temperature", "invalid_type", "must be a finite number"),
        (COMPLETIONS, completion(temperature=10**400), "temperature", "invalid_type", "must be a finite number"),
        (COMPLETIONS, completion(top_p=0), "top_p", "invalid_value", "must be above 0"),
        (COMPLETIONS, completion(seed=2**63), "seed", "invalid_value", f"must be below {2**63}"),
        (COMPLETIONS, completion(stream=1), "stream", "invalid_type", "must be true or false"),
        (COMPLETIONS, completion(stop=5), "stop", "invalid_value", "must be a string or a list of strings"),
        (COMPLETIONS, completion(stop=["x", 5]), "stop[1]", "invalid_type", "must be a string"),
        (COMPLETIONS, completion(stop=[""]), "stop", "invalid_value", "must have strings of 1 to 1000 characters"),
        (COMPLETIONS, completion(stop=["x"] * 17), "stop", "invalid_value", "must have at most 16 elements"),
        (COMPLETIONS, completion(user=5), "user", "invalid_type", "must be a string"),
        (COMPLETIONS, completion(metadata=[]), "metadata", "invalid_type", "must be an object"),
        (COMPLETIONS, completion(stream_options=[]), "stream_options", "invalid_type", "must be an object"),
        (COMPLETIONS, completion(stream_options={"include_obfuscation": True}), "stream_options.include_obfuscation",
         "unsupported_parameter", "is not supported"),
        (COMPLETIONS, completion(max_completion_tokens=5), "max_completion_tokens", "unsupported_parameter",
         "is not supported"),
        (CHATS, chat(max_completion_tokens=5), "max_completion_tokens", "invalid_value", "must equal max_tokens"),
        (CHATS, chat(messages=[]), "messages", "invalid_value", "must not be empty"),
        (CHATS, chat(messages="x"), "messages", "invalid_type", "must be a list"),
        (CHATS, chat(messages=[5]), "messages[0]", "invalid_type", "must be an object"),
        (CHATS, chat({"role": "wizard", "content": "x"}), "messages[0].role", "invalid_value",
         "must be 'system', 'developer', 'user', 'assistant' or 'tool'"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(ask, path, body, param, code, sentence):
    status, _, content = ask(path, body)
    assert (status, content["error"]["param"], content["error"]["code"]) == (400, param, code)
    assert content["error"]["message"].startswith(f"{param} {sentence}")


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_every_honoured_field_reaches_the_engine(ask, engine, monkeypatch, path):
    heard, submit = [], engine.submit

    def note(ids, sampling, on_piece, wanted):
        heard.append((ids, sampling))
        return submit(ids, sampling, on_piece, wanted)

    monkeypatch.setattr(engine, "submit", note)
    length = "max_tokens" if path == COMPLETIONS else "max_completion_tokens"
    body = completion() if path == COMPLETIONS else chat()
    del body["max_tokens"]
    more = {"stop": "never", "logit_bias": {"7": 1.5}, "stop_token_ids": [9]}
    assert ask(path, {**body, **SAMPLED, **more, length: 2.0})[0] == 200
    ids, sampling = heard[0]
    assert sampling == Sampling(
        **SAMPLED, stop=("never",), max_new_tokens=2, logit_bias=((7, 1.5),), stop_token_ids=(9,)
    )
    assert engine.tokenizer.decode(ids) == ("x" if path == COMPLETIONS else "u:x\na:")


def test_the_coldest_temperature_takes_the_likeliest_token(ask, engine):
    expected = generate(engine.model, engine.tokenizer, "The sea", Sampling(max_new_tokens=6)).text
    for temperature in (1e-6, 1e-9, 5e-324):
        asked = completion(prompt="The sea", max_tokens=6, temperature=temperature)
        assert ask(COMPLETIONS, asked)[2]["choices"][0]["text"] == expected


def test_the_documentation_lists_the_accepted_fields():
    text = (ROOT / "docs" / "serving.md").read_text()
    for name in {
        *CompletionRequest.model_fields,
        *ChatRequest.model_fields,
        *CompletionRequest.neutral,
        *ChatRequest.neutral,
    }:
        assert f"`{name}`" in text, name

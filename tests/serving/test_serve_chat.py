"""Chats as agents send them: variables of the template, tools, histories with calls, reasoning, and control tokens."""

import json

import pytest
from transformers import AddedToken

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from test_chat_formats import ANSWERS, HARMONY, TOOLS  # noqa: E402

from moepack.integrations.loading import open_model, open_tokenizer  # noqa: E402
from moepack.serving.engine import Engine  # noqa: E402
from moepack.serving.http.server import Settings, create_app  # noqa: E402
from moepack.serving.sequence import Piece, Sequence  # noqa: E402
from moepack.serving.text.prompts import Chat, chat_prompt  # noqa: E402
from request_support import CHATS, asking, chat  # noqa: E402

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{{ '\\n' }}{% endif %}{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}"
    "</tool_call>{% endfor %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %} <think></think>{% endif %}{% endif %}"
)
USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "x"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"place": "here"}'}}]}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "1", "content": "fog"}


@pytest.fixture(scope="module")
def engine(packed):
    tokenizer = open_tokenizer(packed)
    tokenizer.chat_template = TEMPLATE
    engine = Engine(open_model(packed, "float32", mode="exact"), tokenizer, slots=4, context=2000).start()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def ask(engine):
    with asking(engine) as send:
        yield lambda body, app=None: send(CHATS, body, app=app)[::2]


@pytest.fixture
def prompts(engine, monkeypatch):
    """The prompts that reach the engine."""
    heard, submit = [], engine.submit

    def note(ids, *others):
        heard.append(engine.tokenizer.decode(ids))
        return submit(ids, *others)

    monkeypatch.setattr(engine, "submit", note)
    return heard


@pytest.fixture
def says(monkeypatch):
    """A function that lets the model write a text, one character at a time."""

    def says(text):
        def take(self, part, logits):
            self.read += len(part.ids)
            place = len(self.ids) - self.prompt
            self.ids.append(5)
            if place == len(text) - 1:
                return self.finish("stop", text[place])
            self._emit(Piece(text[place]))
            return False

        monkeypatch.setattr(Sequence, "take", take)

    return says


def refused(answer):
    status, content = answer
    assert status == 400, content
    return content["error"]["param"], content["error"]["message"]


@pytest.mark.parametrize("field", ["thinking_token_budget", "thinking_budget_tokens"])
def test_a_budget_of_reasoning_reaches_the_engine(ask, engine, monkeypatch, field):
    """The tokenizer has no token that ends reasoning until one is added; then the answer is bounded."""
    assert ask(chat(**{field: -1}))[0] == 200
    assert refused(ask(chat(**{field: 5})))[0] == field
    added = {**engine.tokenizer.added_tokens_decoder, 7: AddedToken("</think>")}
    monkeypatch.setattr(type(engine.tokenizer), "added_tokens_decoder", property(lambda self: added))
    wanted, submit = [], engine.submit
    monkeypatch.setattr(engine, "submit", lambda *given: wanted.append(given[3]) or submit(*given))
    assert ask(chat(**{field: 5}))[0] == 200
    assert wanted[0].constraint._budget.limit == 5 and wanted[0].constraint._budget.closes == 7
    both = {"thinking_token_budget": 5, "thinking_budget_tokens": 6}
    assert refused(ask(chat(**both)))[0] == "thinking_budget_tokens"


def test_variables_reach_the_template(ask, prompts, engine):
    for more in ({}, {"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert ask(chat(**more))[0] == 200
    assert ask(chat(), app=create_app(engine, Settings("tiny", variables={"enable_thinking": False})))[0] == 200
    plain, first, second, third = prompts
    assert plain.endswith("assistant:") and first == second == third == f"{plain} <think></think>"
    assert refused(ask(chat(chat_template_kwargs={"think": False})))[0] == "chat_template_kwargs.think"
    assert refused(ask(chat(reasoning_effort="low")))[0] == "reasoning_effort"
    with pytest.raises(ValueError, match="does not use the variable 'think'"):
        create_app(engine, Settings("tiny", variables={"think": False}))


def test_the_last_message_is_continued_or_the_answer_not_opened(ask, prompts):
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert ask(chat(messages=[USER, SAID], **more))[0] == 200
    assert ask(chat(messages=[USER, SAID], continue_final_message=True))[0] == 200
    assert ask(chat(messages=[USER, SAID], add_generation_prompt=False))[0] == 200
    assert prompts == ["user: hi\nassistant: x"] * 2 + ["user: hi\nassistant: x\n"]
    body = chat(messages=[USER, SAID], continue_final_message=True, add_generation_prompt=True)
    assert refused(ask(body))[0] == "continue_final_message"


def test_another_template_replaces_the_model_s(ask, prompts, engine):
    app = create_app(engine, Settings("tiny", template="{{ messages[0].content }}!"))
    assert ask(chat(), app=app)[0] == 200 and prompts == ["x!"]


def test_histories_with_calls_are_rendered(ask, prompts):
    thought = {**SAID, "reasoning_content": "hm"}
    assert ask(chat(messages=[USER, thought, USER, CALLED, RESULT], tools=TOOLS))[0] == 200
    assert (
        '<think>hm</think>x\nuser: hi\nassistant: <tool_call>{"name": "look", "arguments": {"place": "here"}}'
        in prompts[0]
    )
    assert "tool: fog\nassistant:" in prompts[0] and prompts[0].startswith('[{"type": "function"')
    assert ask(chat(tools=TOOLS, tool_choice="none"))[0] == 200 and prompts[1].startswith("user: ")


def test_what_a_template_ignores_is_refused(ask, engine):
    app = create_app(engine, Settings("tiny", template="{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>"))
    for body, param in (
        (chat(tools=TOOLS), "tools"),
        (chat(messages=[USER, CALLED | {"content": "x"}, RESULT]), "messages[1].tool_calls"),
        (chat(messages=[USER, {**USER, "name": "Ann"}]), "messages[1].name"),
        (chat(messages=[USER, {**SAID, "reasoning_content": "a"}]), "messages[1].reasoning_content"),
    ):
        assert refused(ask(body, app=app)) == (param, f"{param} is not supported: the model's chat template ignores it")
    app = create_app(engine, Settings("tiny", template="{{ tools | tojson }}"))
    assert refused(ask(chat(tools=TOOLS), app=app))[0] == "tools"


def test_a_variable_is_refused_by_the_name_of_its_field(ask, engine):
    app = create_app(engine, Settings("tiny", template="{{ messages[0].content }}"))
    for more, param in (
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"enable_thinking": True}, "enable_thinking"),
        ({"chat_template_kwargs": {"other": 1}}, "chat_template_kwargs.other"),
    ):
        assert refused(ask(chat(**more), app=app))[0] == param


def test_a_name_that_repeats_the_role_says_nothing(ask, prompts):
    assert ask(chat(messages=[{**USER, "name": "user"}]))[0] == 200
    assert prompts[-1].endswith("user: hi\nassistant:")


def test_later_system_messages_move_to_the_beginning_if_the_template_wants_them_there(ask, prompts, engine):
    messages = [{"role": "system", "content": "be kind"}, USER, {"role": "system", "content": "it is Monday"}, USER]
    assert ask(chat(messages=messages))[0] == 200
    assert prompts[-1].endswith("system: be kind\nuser: hi\nsystem: it is Monday\nuser: hi\nassistant:")
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% for call in m.tool_calls or [] %}"
        "{% if call.function.arguments is mapping %}{{ raise_exception('text') }}{% endif %}"
        "<tool_call>{{ call.function.arguments }}</tool_call>{% endfor %}{% endfor %}"
    )
    app = create_app(engine, Settings("tiny", template=strict))
    assert ask(chat(messages=messages), app=app)[0] == 200
    assert prompts[-1].endswith("system: be kind\n\nit is Monday\nuser: hi\nuser: hi\n")
    assert ask(chat(messages=[*messages, CALLED | {"content": ""}, RESULT]), app=app)[0] == 200
    assert '<tool_call>{"place": "here"}</tool_call>' in prompts[-1]
    assert ask(chat(messages=[USER, CALLED | {"content": ""}, RESULT]), app=app)[0] == 200


def whole(chunks):
    """What a client of OpenAI joins of the chunks of an answer."""
    message = {"content": "", "reasoning_content": "", "calls": {}}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            name, arguments = message["calls"].get(call["index"], ("", ""))
            assert bool(name) != ("id" in call)
            function = call["function"]
            message["calls"][call["index"]] = (name + function.get("name", ""), arguments + function["arguments"])
    return message


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_split_whole_and_streamed(ask, engine, says, name):
    template, prompt, text, (reasoning, content, calls) = ANSWERS[name]
    template = "{{ tools | tojson }}{{ messages[0].content }}{% if false %}" + template + "{% endif %}" + prompt
    app = create_app(engine, Settings("tiny", template=template))
    says(text)
    status, answer = ask(chat(tools=TOOLS), app=app)
    assert status == 200, answer
    choice = answer["choices"][0]
    message = openai.types.chat.ChatCompletion.model_validate(answer).choices[0].message
    assert (message.content or "", choice["message"].get("reasoning_content", "")) == (content, reasoning)
    found = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    assert found == calls and choice["finish_reason"] == ("tool_calls" if calls else "stop")
    status, data = ask(chat(tools=TOOLS, stream=True), app=app)
    events = [event.removeprefix("data: ") for event in data.decode().split("\n\n")]
    assert events[-2:] == ["[DONE]", ""]
    chunks = [json.loads(event) for event in events[:-2]]
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk)
    streamed = whole(chunks)
    assert (streamed["content"], streamed["reasoning_content"]) == (content, reasoning)
    assert [(name, json.loads(arguments)) for name, arguments in streamed["calls"].values()] == calls
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [choice["finish_reason"]]


SCHEMA = {"type": "object", "properties": {"place": {"enum": ["sea", "fire"]}, "days": {"type": "integer", "minimum": 1,
          "maximum": 9}}, "required": ["place", "days"], "additionalProperties": False}  # fmt: skip
STRICT = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "go")]
MARKED = {
    "hermes": "<tool_call>",
    "thinking": "<tool_call> <think> </think>",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "deepseek 3": "<｜tool▁calls▁begin｜> ```json",
    "deepseek 3.2": "<｜DSML｜function_calls>",
    "mistral": "[TOOL_CALLS]",
    "mistral 11": "[TOOL_CALLS] [ARGS]",
    "harmony": HARMONY,
}


@pytest.mark.parametrize("family", MARKED)
@pytest.mark.parametrize("choice", ["required", "go"])
def test_a_required_call_is_written_by_any_model(ask, engine, family, choice):
    pytest.importorskip("llguidance")
    template = "{{ tools | tojson }}{{ messages[0].content }}{% if false %}" + MARKED[family] + "{% endif %}"
    app = create_app(engine, Settings("tiny", template=template))
    named = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    body = chat(tools=STRICT, tool_choice=named, parallel_tool_calls=False) | {"max_tokens": 400, "seed": 1}
    for temperature in (0, 1.5):
        status, answer = ask({**body, "temperature": temperature}, app=app)
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert answer["choices"][0]["finish_reason"] == "tool_calls" and not message["content"]
        assert call["function"]["name"] in (("look", "go") if choice == "required" else (choice,))
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["place"] in ("sea", "fire") and 1 <= arguments["days"] <= 9


def test_messages_cannot_write_control_tokens(engine):
    """What spells a control token in a message is text; what the template writes is a token."""
    tokenizer = engine.tokenizer
    special = [token for token in tokenizer.all_special_tokens if token.startswith("<")]
    ends = set(tokenizer.convert_tokens_to_ids(special))
    template = "<s>{% for m in messages %}{{ m.content }}</s>{% endfor %}{{ tools | tojson }}{{ place }}"
    for token in special:
        content = f"a{token}b {token}{token}"
        messages = [{"role": role, "content": content} for role in ("system", "user", "assistant", "tool")]
        tools = [{"type": "function", "function": {"name": "f", "description": content}}]
        text, ids = chat_prompt(tokenizer, Chat(messages, tools, template=template, variables={"place": content}))
        assert tokenizer.decode(ids) == text and text.count(content) == 6
        found = [tokenizer.convert_ids_to_tokens(one) for one in ids if one in ends]
        assert found == ["<s>", *["</s>"] * 4]
    plain = [{"role": "user", "content": "a b"}]
    text, ids = chat_prompt(tokenizer, Chat(plain, template=template))
    assert ids == tokenizer(text, add_special_tokens=False).input_ids


def test_scores_of_chats(ask, engine):
    status, answer = ask(chat(logprobs=True, top_logprobs=2, temperature=0) | {"max_tokens": 6})
    assert status == 200
    choice = openai.types.chat.ChatCompletion.model_validate(answer).choices[0]
    assert "".join(score.token for score in choice.logprobs.content) == choice.message.content
    for score in choice.logprobs.content:
        assert score.logprob == score.top_logprobs[0].logprob and len(score.top_logprobs) == 2
        assert bytes(score.bytes).decode() == score.token
    _, data = ask(chat(logprobs=True, top_logprobs=2, temperature=0, stream=True) | {"max_tokens": 6})
    chunks = [json.loads(event.removeprefix("data: ")) for event in data.decode().split("\n\n")[:-2]]
    streamed = [s for c in chunks for s in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    known = answer["choices"][0]["logprobs"]["content"]
    assert [score["token"] for score in streamed] == [score["token"] for score in known]
    for score, other in zip(streamed, known, strict=True):  # a pass with other rows rounds differently
        values = [[each["logprob"] for each in (one, *one["top_logprobs"])] for one in (score, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-5)


def test_several_answers_to_a_chat(ask):
    drawn = {"temperature": 1.3, "seed": 4, "n": 3}
    _, answer = ask(chat(**drawn) | {"max_tokens": 8})
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 3 and [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    _, data = ask(chat(**drawn, stream=True, stream_options={"include_usage": True}) | {"max_tokens": 8})
    chunks = [json.loads(event.removeprefix("data: ")) for event in data.decode().split("\n\n")[:-2]]
    for index, text in enumerate(texts):
        own = [c["choices"][0]["delta"].get("content", "") for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert "".join(own) == text
    assert chunks[-1]["usage"] == answer["usage"] | {
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
    }


def test_strict_functions_and_single_calls_leave_text_free(ask, engine):
    """A grammar that allows text and calls: the text is unchanged, and calls follow the schema."""
    pytest.importorskip("llguidance")
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in STRICT]
    template = "{{ messages[0].content }}{{ ' ' if tools }}{% if false %}<tool_call>{% endif %}"
    app = create_app(engine, Settings("tiny", template=template))
    body = chat(temperature=0) | {"max_tokens": 30}
    texts = [ask({**body, **more}, app=app)[1]["choices"][0]["message"]["content"] for more in (
        {"tools": STRICT}, {"tools": strict}, {"tools": STRICT, "parallel_tool_calls": False})]  # fmt: skip
    assert texts[0] and texts == texts[:1] * 3


CALLS = "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}%s{% endfor %}{% endfor %}"
DIALECTS = {
    "deepseek": CALLS.replace("%s", "{{ '<｜tool▁calls▁begin｜>' + c['function']['arguments'] }}"),
    "mistral": CALLS.replace("%s", "{% if c.id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}"
                             "[TOOL_CALLS]{{ c.id }}"),
    "gpt-oss": "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}"
               "{% endif %}{{ m.thinking or '' }}{{ m.content or '' }}{{ m.tool_calls }}{% endfor %}"
               "<|channel|><|message|>",
}  # fmt: skip
"""What templates of families require of messages with calls."""


@pytest.mark.parametrize("family", DIALECTS)
def test_histories_fit_the_templates_of_families(ask, prompts, engine, family):
    app = create_app(engine, Settings("tiny", template=DIALECTS[family]))
    said = {**CALLED, "content": "I look.", "reasoning_content": "hm"}
    if family != "gpt-oss":
        said.pop("reasoning_content")
    for number in ("1", "call_abcdefghij", "toolu_1"):
        call = {**said["tool_calls"][0], "id": number}
        status, answer = ask(
            chat(messages=[USER, {**said, "tool_calls": [call]}, RESULT | {"tool_call_id": number}]), app
        )
        assert status == 200, answer
        assert "I look." in prompts[-1]
    if family == "deepseek":
        assert '{"place": "here"}' in prompts[-1]
    if family == "gpt-oss":
        assert "hm\nI look." in prompts[-1]


def test_a_schema_and_functions_together(ask, engine):
    """The answer follows the schema, or calls a function."""
    pytest.importorskip("llguidance")
    template = "{{ tools | tojson }}{{ messages[0].content }}{% if false %}<tool_call>{% endif %}"
    app = create_app(engine, Settings("tiny", template=template))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    forced = ask(chat(tools=STRICT, response_format=form, tool_choice="required") | {"max_tokens": 400}, app=app)
    assert forced[1]["choices"][0]["message"]["tool_calls"]
    for seed in range(4):
        body = chat(tools=STRICT, response_format=form, temperature=1.5, seed=seed) | {"max_tokens": 400}
        status, answer = ask(body, app=app)
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or [{"function": {"arguments": message["content"]}}]
        assert all(json.loads(call["function"]["arguments"])["place"] in ("sea", "fire") for call in calls)


def test_parallel_calls_of_a_history_are_all_in_the_prompt(ask, prompts, engine):
    """gpt-oss's template writes the first call of a message, and names a result after the call before it."""
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}|"
        "{% endfor %}<|channel|><|message|>"
    )
    app = create_app(engine, Settings("tiny", template=template))
    calls = [{"id": number, "function": {"name": name}} for number, name in (("1", "look"), ("2", "go"), ("3", "stop"))]
    said = {"role": "assistant", "content": "x", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": number, "content": text} for number, text in (("2", "b"), ("1", "a"))]
    assert ask(chat(messages=[USER, said, *results, USER]), app)[0] == 200
    assert prompts[-1].startswith("userhi|assistantxlook|toola|assistantgo|toolb|assistantstop|userhi|")

"""The published clients of OpenAI and Anthropic against a server, and the endpoints that only they and tools use."""

import asyncio
import http.client
import json
import math
import re
import time
from functools import partial

import pytest
import torch
from pydantic import BaseModel, Field

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
prometheus = pytest.importorskip("prometheus_client.parser")

from test_serve_chat import STRICT, TEMPLATE, says  # noqa: E402, F401

from moepack.integrations.loading import open_model, open_tokenizer  # noqa: E402
from moepack.serving.constraint import Budget, Budgeted  # noqa: E402
from moepack.serving.engine import Engine  # noqa: E402
from moepack.serving.http.server import Settings, create_app  # noqa: E402
from serving_support import happens, running  # noqa: E402

KEY = "a secret"
ORIGIN = "https://page.example"
ANSWER = (
    "<think>\nhm\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "look", "arguments": {"place": "sea", "days": 2}}\n</tool_call>'
)
SCHEMA = STRICT[0]["function"]["parameters"]
ARGUMENTS = {"place": "sea", "days": 2}


@pytest.fixture(scope="module")
def engine(packed):
    tokenizer = open_tokenizer(packed)
    tokenizer.chat_template = TEMPLATE
    return Engine(open_model(packed, "float32", mode="exact"), tokenizer, slots=4, context=2000)


@pytest.fixture
def heard(engine, monkeypatch):
    """The prompts that reach the engine."""
    found, submit = [], engine.submit
    monkeypatch.setattr(
        engine, "submit", lambda ids, *others: found.append(engine.tokenizer.decode(ids)) or submit(ids, *others)
    )
    return found


@pytest.fixture(scope="module")
def port(engine):
    with running(create_app(engine, Settings("tiny", api_key=KEY, answer=16, origins=(ORIGIN,)))) as port:
        yield port


@pytest.fixture(scope="module")
def client(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def claude(port):
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key=KEY, max_retries=0)


def send(port, method, path, body=None, **headers):
    """One request; the status, headers and content."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **headers}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, content


USER = [{"role": "user", "content": "hi"}]
TOOLS = STRICT[:1]
FLAT = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
CLAUDE = [{"name": "look", "description": "Look.", "input_schema": SCHEMA}]


class Place(BaseModel):
    name: bool
    days: int = Field(ge=1, le=9)


# OpenAI: chats


def test_an_agent_s_two_turns(client, says):  # noqa: F811
    says(ANSWER)
    first = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS).choices[0]
    (call,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls" and json.loads(call.function.arguments) == ARGUMENTS
    assert (first.message.content, first.message.reasoning_content) == ("I look.", "hm")
    result = {"role": "tool", "tool_call_id": call.id, "content": "fog"}
    says("Fog.")
    history = [*USER, first.message, result]
    assert (
        client.chat.completions.create(model="tiny", messages=history, tools=TOOLS).choices[0].message.content == "Fog."
    )


def test_streams_with_calls(client, says):  # noqa: F811
    says(ANSWER)
    with client.chat.completions.stream(model="tiny", messages=USER, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_completion().choices[0]
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert last.message.content == "I look." and last.finish_reason == "tool_calls"
    assert json.loads(last.message.tool_calls[0].function.arguments) == ARGUMENTS


def test_structured_outputs(client):
    asked = {"model": "tiny", "messages": USER, "max_tokens": 200, "temperature": 0}
    found = client.chat.completions.parse(**asked, response_format=Place).choices[0].message.parsed
    assert isinstance(found, Place)
    extra = {"guided_choice": ["north", "south"]}
    assert (
        client.chat.completions.create(**asked, extra_body=extra).choices[0].message.content in extra["guided_choice"]
    )


def test_asynchronous_clients_get_their_own_answers(port, client):
    prompts = [f"{number} and" for number in range(8)]
    alone = [client.completions.create(model="tiny", prompt=p, temperature=0).choices[0].text for p in prompts]

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY) as many:
            tasks = [many.completions.create(model="tiny", prompt=p, temperature=0) for p in prompts]
            return [answer.choices[0].text for answer in await asyncio.gather(*tasks)]

    assert asyncio.run(ask()) == alone
    together = client.completions.create(model="tiny", prompt=prompts, temperature=0)
    assert [choice.text for choice in together.choices] == alone


# OpenAI: responses


def test_responses_whole_and_streamed(client, says):  # noqa: F811
    says(ANSWER)
    whole = client.responses.create(model="tiny", input="hi", tools=FLAT, store=False)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output_text == "I look." and json.loads(whole.output[2].arguments) == ARGUMENTS
    assert whole.status == "completed" and whole.usage.output_tokens == len(ANSWER)
    events = list(client.responses.create(model="tiny", input="hi", tools=FLAT, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "I look."
    last = events[-1].response
    assert events[-1].type == "response.completed" and last.output_text == "I look."
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert 0 < last.usage.output_tokens_details.reasoning_tokens < 10
    with client.responses.stream(model="tiny", input="hi", tools=FLAT) as stream:
        stream.until_done()
        assert stream.get_final_response().output[2].name == "look"


def test_a_response_continues_a_history(client, says):  # noqa: F811
    says(ANSWER)
    first = client.responses.create(model="tiny", input="hi", tools=FLAT)
    given = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "fog"}
    says("Fog.")
    history = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, *given, result]
    assert (
        client.responses.create(model="tiny", input=history, instructions="Be kind.", tools=FLAT).output_text == "Fog."
    )


def test_responses_follow_a_schema_or_are_cut(client):
    found = client.responses.parse(model="tiny", input="hi", text_format=Place, max_output_tokens=200, temperature=0)
    assert isinstance(found.output_parsed, Place)
    cut = client.responses.create(model="tiny", input="hi", max_output_tokens=2, temperature=0)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_long_history_loses_its_oldest_items_on_request(client, says):  # noqa: F811
    says("Fog.")
    asked = [{"role": "developer", "content": "Be kind."}]
    for number in range(50):
        asked += [{"role": "user", "content": f"{number} " * 20}, {"role": "assistant", "content": "x" * 60}]
    asked.append({"role": "user", "content": "hi"})
    create = partial(client.responses.create, model="tiny", max_output_tokens=40)
    with pytest.raises(openai.BadRequestError, match="the context is") as caught:
        create(input=asked)
    found = create(input=asked, truncation="auto")
    assert (found.output_text, found.truncation) == ("Fog.", "auto")
    counts = [create(input=[asked[0], *asked[at:]]).usage.input_tokens for at in range(99, 73, -2)]
    assert found.usage.input_tokens in counts
    room = int(re.search(r"the context is (\d+)", str(caught.value))[1]) - 40
    assert found.usage.input_tokens <= room < found.usage.input_tokens + counts[1] - counts[0]
    with pytest.raises(openai.BadRequestError, match="the context is"):
        create(input=[*asked, {"role": "user", "content": "x" * 9000}], truncation="auto")


@pytest.mark.parametrize(
    ("more", "param"),
    [({"previous_response_id": "resp_1"}, "previous_response_id"), ({"store": True}, "store"),
     ({"background": True}, "background"), ({"input": [{"type": "image"}]}, "input[0].type"),
     ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
     ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"include": ["file_search_call.results"]}, "include"),
     ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
     ({"tool_choice": "x"}, "tool_choice")],
    ids=str,
)  # fmt: skip
def test_responses_refuse_by_name(port, more, param):
    status, _, content = send(port, "POST", "/v1/responses", {"model": "tiny", "input": "hi", **more})
    assert (status, json.loads(content)["error"]["param"]) == (400, param)


# Anthropic


def test_messages_whole_and_streamed(claude, says):  # noqa: F811
    says(ANSWER)
    asked = {"model": "tiny", "max_tokens": 200, "messages": USER, "tools": CLAUDE, "system": "Be kind."}
    whole = claude.messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert (whole.content[0].thinking, whole.content[1].text, whole.content[2].input) == ("hm", "I look.", ARGUMENTS)
    assert whole.stop_reason == "tool_use" and whole.usage.output_tokens == len(ANSWER)
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == "I look."
        last = stream.get_final_message()
    assert [block.type for block in last.content] == ["thinking", "text", "tool_use"]
    assert (last.content[2].input, last.stop_reason) == (ARGUMENTS, "tool_use")
    assert last.usage.output_tokens == whole.usage.output_tokens
    said = [block.model_dump(exclude_none=True) for block in whole.content]
    for block in said:
        block.pop("caller", None)
    result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "fog", "is_error": True}
    history = [*USER, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    says("Fog.")
    assert claude.messages.create(**{**asked, "messages": history}).content[0].text == "Fog."
    assert claude.messages.count_tokens(model="tiny", messages=USER).input_tokens == len("user: hi\nassistant:")


def test_messages_end_at_stop_sequences_and_lengths(claude):
    asked = {"model": "tiny", "messages": USER}
    free = claude.messages.create(**asked, max_tokens=12)
    text = free.content[0].text
    assert free.stop_reason == "max_tokens"
    stopped = claude.messages.create(**asked, max_tokens=12, stop_sequences=[text[3:5]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3:5])
    continued = claude.messages.create(**{**asked, "messages": [*USER, {"role": "assistant", "content": text[:4]}]},
                                       max_tokens=8)  # fmt: skip
    assert continued.content[0].text == text[4:]


def test_messages_call_a_required_function(claude):
    asked = {"model": "tiny", "max_tokens": 300, "messages": USER, "tools": CLAUDE}
    (block,) = claude.messages.create(**asked, tool_choice={"type": "any", "disable_parallel_tool_use": True}).content
    assert block.name == "look" and block.input["place"] in ("sea", "fire")


def test_failures_have_anthropic_s_form(port, claude):
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'other'"):
        claude.messages.create(model="other", max_tokens=1, messages=USER)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=claude.base_url, api_key="x").messages.create(
            model="tiny", max_tokens=1, messages=USER
        )
    for more, param in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*USER, {"role": "system", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
         "messages[1].content[0].type"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns"}}]}},
         "context_management.edits[0].keep"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ):  # fmt: skip
        status, _, content = send(
            port, "POST", "/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": USER, **more}
        )
        found = json.loads(content)
        assert (status, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")
        assert found["error"]["param"] == param


def test_what_claude_code_always_sends_is_accepted(port, says, heard):  # noqa: F811
    more = {
        "system": [{"type": "text", "text": "be kind"}],
        "messages": [
            *USER,
            {"role": "system", "content": "it is Monday"},
            {"role": "assistant", "content": "Fog"},
            *USER,
        ],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "tools": [{**CLAUDE[0], "defer_loading": False}],
    }
    says("Fog.")
    status, _, content = send(port, "POST", "/v1/messages?beta=true", {"model": "tiny", "max_tokens": 16, **more})
    assert status == 200, content
    assert heard[-1].endswith("system: be kind\nuser: hi\nsystem: it is Monday\nassistant: Fog\nuser: hi\nassistant:")


def test_streams_show_that_a_prompt_is_being_read(port, engine, monkeypatch):
    step = engine._step
    monkeypatch.setattr("moepack.serving.http.answers.SILENCE", 0.02)
    monkeypatch.setattr(engine, "_step", lambda: (time.sleep(0.1), step())[1])
    status, _, content = send(
        port, "POST", "/v1/messages", {"model": "tiny", "max_tokens": 2, "messages": USER, "stream": True}
    )
    first, _, rest = content.partition("event: content_block_start")
    assert status == 200 and first.startswith("event: message_start")
    assert 'event: ping\ndata: {"type": "ping"}\n\n' in first and "event: message_stop" in rest and "ping" not in rest
    _, _, content = send(
        port, "POST", "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2, "stream": True}
    )
    comments = [part for part in content.split("\n\n") if part.startswith(":")]
    assert comments and content.startswith(comments[0]) and content.endswith("data: [DONE]\n\n")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
    chunks = list(client.chat.completions.create(model="tiny", messages=USER, max_tokens=2, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_threads_are_refused_so_that_clients_send_all_messages(port):
    body = {"model": "tiny", "max_tokens": 1, "messages": USER, "thread": {"type": "create"}}
    status, _, content = send(port, "POST", "/v1/messages", body)
    error = json.loads(content)["error"]
    assert (status, error["param"]) == (400, "thread")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_programs_may_omit_the_content_type(port):
    def asked(**headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1})
        connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {KEY}", **headers})
        status = connection.getresponse().status
        connection.close()
        return status

    assert asked() == 200
    assert asked(**{"Content-Type": "text/plain"}) == 415
    for name, value in (("Origin", ORIGIN), ("Origin", "null"), ("Sec-Fetch-Site", "cross-site")):
        assert asked(**{name: value}) == 415


# Embeddings, tokens, models, metrics, origins


def test_embeddings_are_the_model_s_states(client, engine):
    texts = ["The sea", "a wolf and a fire " * 40]
    states = []
    for text in texts:
        with torch.inference_mode():
            output = engine.model(torch.tensor([engine.tokenizer(text).input_ids]), output_hidden_states=True)
        states.append(output.hidden_states[-1][0].float())
    for pooling in ("mean", "last"):
        found = client.embeddings.create(model="tiny", input=texts, extra_body={"pooling": pooling})
        for state, entry in zip(states, found.data, strict=True):
            pooled = state.mean(0) if pooling == "mean" else state[-1]
            expected = torch.nn.functional.normalize(pooled, dim=0)
            torch.testing.assert_close(torch.tensor(entry.embedding), expected, rtol=1e-4, atol=1e-5)
    assert found.usage.prompt_tokens == sum(len(engine.tokenizer(text).input_ids) for text in texts)
    numbers = client.embeddings.create(model="tiny", input=texts[0], encoding_format="float").data[0].embedding
    assert math.isclose(sum(value * value for value in numbers), 1, rel_tol=1e-5)
    bare = client.embeddings.create(model="tiny", input="x", encoding_format="float", extra_body={"normalize": False})
    assert not math.isclose(sum(value * value for value in bare.data[0].embedding), 1, rel_tol=1e-2)
    with pytest.raises(openai.BadRequestError, match="dimensions must be 64"):
        client.embeddings.create(model="tiny", input="x", dimensions=8)
    with pytest.raises(openai.BadRequestError, match="outside the model's vocabulary"):
        client.embeddings.create(model="tiny", input=[999_999])


def test_tokens_of_texts_and_chats(port, engine):
    def ask(path, **body):
        status, _, content = send(port, "POST", path, body)
        return json.loads(content) if status == 200 else json.loads(content)["error"]["param"]

    ids = engine.tokenizer("a</s>b").input_ids
    assert ask("/tokenize", prompt="a</s>b", model="tiny")["tokens"] == ids
    assert ask("/tokenize", content="a</s>b", add_special=True)["tokens"] == ids
    plain = ask("/tokenize", content="a</s>b", parse_special=False)
    assert len(plain["tokens"]) == plain["count"] == len("a</s>b")
    assert ask("/tokenize", content="ab", with_pieces=True)["tokens"][0]["piece"] == "a"
    assert ask("/tokenize", prompt="é", return_token_strs=True)["token_strs"] == ["bytes:\\xc3", "bytes:\\xa9"]
    chat = ask("/tokenize", messages=USER)
    assert ask("/detokenize", tokens=chat["tokens"]) == dict.fromkeys(("prompt", "content"), "user: hi\nassistant:")
    assert ask("/tokenize", content="a", prompt="b") == "content" and ask("/tokenize") == "prompt"
    assert ask("/detokenize", tokens=[-1]) == "tokens"


def test_models_say_what_they_are(client, engine):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len, model.meta["n_vocab"]) == ("tiny", engine.context, engine.logits)


def test_metrics_count_what_was_answered(port, client):
    def read():
        status, headers, content = send(port, "GET", "/metrics")
        assert status == 200 and headers["content-type"].startswith("text/plain")
        families = prometheus.text_string_to_metric_families(content)
        return {(s.name, s.labels.get("finished_reason")): s.value for family in families for s in family.samples
                if "le" not in s.labels}  # fmt: skip

    before = read()
    for n in (1, 2):
        asked = {"model": "tiny", "prompt": "The sea", "max_tokens": 5, "temperature": 0, "n": n}
        client.completions.create(**asked, extra_body={"ignore_eos": True})
    after = read()
    grown = {key: after[key] - before.get(key, 0) for key in after}
    assert grown["vllm:prompt_tokens_total", None] == 21 and grown["vllm:generation_tokens_total", None] == 15
    assert grown["vllm:request_success_total", "length"] == 3
    assert grown["vllm:time_to_first_token_seconds_count", None] == 3
    assert grown["vllm:inter_token_latency_seconds_count", None] == 12
    assert happens(lambda: read()["vllm:num_requests_running", None] == 0)
    assert after["process_resident_memory_bytes", None] > 0
    assert send(port, "GET", "/metrics", Authorization="Bearer x")[0] == 401


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/health", "/nothing"])
def test_pages_of_a_permitted_origin_may_ask(port, path):
    asked = {"Origin": ORIGIN, "Authorization": "", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    status, headers, _ = send(port, "OPTIONS", path, **asked)
    assert status == 204 and headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in headers["access-control-allow-methods"] and headers["allow"]
    assert headers["access-control-allow-headers"] == "authorization,content-type"
    for key in (f"Bearer {KEY}", ""):  # errors can be read by the page, too
        _, headers, _ = send(port, "GET", path, Origin=ORIGIN, Authorization=key)
        assert headers["access-control-allow-origin"] == ORIGIN and "origin" in headers["vary"].lower()


def test_other_origins_get_no_permission(port, engine):
    for origin in ("https://other.example", "null", f"{ORIGIN}.other.example"):
        for method in ("OPTIONS", "GET"):
            _, headers, _ = send(port, method, "/v1/models", Origin=origin)
            assert not any(name.startswith("access-control") for name in headers)


def test_every_origin_and_none(engine):
    for origins, expected in ((("*",), "*"), ((), None)):
        sent = []
        app = create_app(engine, Settings("tiny", origins=origins))
        scope = {"type": "http", "method": "OPTIONS", "path": "/v1/models", "query_string": b"",
                 "headers": [(b"origin", b"https://any.example")]}  # fmt: skip

        async def send_(message, sent=sent):
            sent.append(message)

        asyncio.run(app(scope, None, send_))
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        assert sent[0]["status"] == 204 and headers.get("access-control-allow-origin") == expected


def test_a_budget_ends_reasoning():
    """The token that ends reasoning is forced after a number of tokens; the rest is unconstrained."""
    budget = Budgeted(Budget(3, opens=7, closes=8, is_inside=False), 20, None)
    for token in (1, 2, 3, 4, 7, 5, 5):
        assert budget.allowed() is None
        budget.take(token)
    budget.take(5)
    assert budget.allowed().nonzero().tolist() == [[8]]
    budget.take(8)
    assert budget.allowed() is None and not budget.is_complete

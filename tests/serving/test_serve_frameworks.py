"""LangChain's OpenAI classes against a server: calls of tools, structured answers, streams."""

import pytest
from pydantic import BaseModel, Field

pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

from test_serve_chat import TEMPLATE, says  # noqa: F401

from moepack.integrations.loading import open_model, open_tokenizer
from moepack.serving.engine import Engine
from moepack.serving.http.server import Settings, create_app
from serving_support import running

CALLS = (
    "I look."
    '\n<tool_call>\n{"name": "look", "arguments": {"place": "sea", "days": 2}}\n</tool_call>'
    '\n<tool_call>\n{"name": "look", "arguments": {"place": "fire", "days": 1}}\n</tool_call>'
)
ARGUMENTS = [{"place": "sea", "days": 2}, {"place": "fire", "days": 1}]


class Place(BaseModel):
    """Where to go."""

    north: bool
    days: int = Field(ge=1, le=9)


def look(place: str, days: int) -> str:
    """Look at a place."""
    return f"fog at the {place} for {days} days"


@pytest.fixture(scope="module")
def port(packed):
    tokenizer = open_tokenizer(packed)
    tokenizer.chat_template = TEMPLATE
    engine = Engine(open_model(packed, "float32", mode="exact"), tokenizer, slots=4, context=2000)
    with running(create_app(engine, Settings("tiny", api_key="a secret"))) as port:
        yield port


class TestLangChain:
    @pytest.fixture(scope="class")
    def chat(self, port):
        openai = pytest.importorskip("langchain_openai")
        address = f"http://127.0.0.1:{port}/v1"
        return openai.ChatOpenAI(
            model="tiny", base_url=address, api_key="a secret", temperature=0, max_tokens=200, max_retries=0
        )

    @pytest.mark.parametrize("method", ["function_calling", "json_schema"])
    @pytest.mark.parametrize("includes_raw", [False, True])
    def test_structured_output(self, chat, method, includes_raw):
        """The model is random: only constrained answers have the fields."""
        found = chat.with_structured_output(Place, method=method, include_raw=includes_raw).invoke("Where?")
        assert isinstance(found["parsed"] if includes_raw else found, Place)

    def test_any_object(self, chat, says):  # noqa: F811
        says('{"north": true, "days": 2}')
        found = chat.with_structured_output(Place, method="json_mode").invoke("Where?")
        assert found == Place(north=True, days=2)

    @pytest.mark.parametrize("method", ["function_calling", "json_schema"])
    def test_structured_streams(self, chat, method):
        last = list(chat.with_structured_output(Place, method=method).stream("Where?"))[-1]
        assert isinstance(last, Place)

    def test_strict_functions_and_schemas_as_dicts(self, chat):
        schema = {**Place.model_json_schema(), "additionalProperties": False}
        found = chat.with_structured_output(schema, method="function_calling", strict=True).invoke("Where?")
        assert Place.model_validate(found)

    @pytest.mark.parametrize("choice", [None, "auto"])
    def test_an_agent_s_turns(self, chat, says, choice):  # noqa: F811
        """Two calls, their results, and an answer."""
        says(CALLS)
        bound = chat.bind_tools([look], tool_choice=choice)
        history = [("user", "hi")]
        said = bound.invoke(history)
        assert said.content == "I look." and [call["args"] for call in said.tool_calls] == ARGUMENTS
        assert said.usage_metadata["output_tokens"] == len(CALLS)
        from langchain_core.messages import ToolMessage

        results = [ToolMessage(look(**call["args"]), tool_call_id=call["id"]) for call in said.tool_calls]
        says("Fog.")
        assert bound.invoke([*history, said, *results]).content == "Fog."

    def test_streamed_calls_add_up(self, chat, says):  # noqa: F811
        says(CALLS)
        first, *others = chat.bind_tools([look]).stream("hi")
        whole = first
        for chunk in others:
            whole += chunk
        assert len(others) > 2 and whole.content == "I look."
        assert [call["args"] for call in whole.tool_calls] == ARGUMENTS

    @pytest.mark.parametrize("choice", ["Place", "any", "required", True])
    def test_required_calls_follow_their_schema(self, chat, choice):
        (call,) = chat.bind_tools([Place], tool_choice=choice, parallel_tool_calls=False).invoke("hi").tool_calls
        assert call["name"] == "Place" and Place.model_validate(call["args"])

    def test_none_calls_nothing(self, chat):
        assert not chat.bind_tools([look], tool_choice="none").invoke("hi").tool_calls

    def test_completions_and_responses(self, port, says):  # noqa: F811
        openai = pytest.importorskip("langchain_openai")
        address = {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": "a secret", "max_retries": 0}
        says(CALLS)
        said = openai.ChatOpenAI(model="tiny", use_responses_api=True, **address).bind_tools([look]).invoke("hi")
        assert [call["args"] for call in said.tool_calls] == ARGUMENTS
        says("Fog.")
        assert openai.OpenAI(model="tiny", **address).invoke("hi") == "Fog."

    def test_embeddings(self, port):
        openai = pytest.importorskip("langchain_openai")
        address = {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": "a secret"}
        embeddings = openai.OpenAIEmbeddings(model="tiny", check_embedding_ctx_length=False, **address)
        assert len(embeddings.embed_query("hi")) == len(embeddings.embed_documents(["hi", "you"])[1])

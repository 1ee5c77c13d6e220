"""Schemas and tools as client libraries have them: OpenAI's helpers for pydantic, and LangChain, both as they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.support.cluster import MODEL, Cluster
from tests.support.lazily import langchain_openai, langchain_tools, openai

_Name = Annotated[str, Field(max_length=8)]


class _Closed(BaseModel):
    """Texts and lists have bounds, and objects no further properties, so that outputs are short and never cut."""

    model_config = ConfigDict(extra="forbid")


class City(_Closed):
    """A city at a river."""

    name: _Name


class River(_Closed):
    """A river, with options, and with a list of another type."""

    kind: Literal["long", "short"]
    cities: Annotated[list[City], Field(min_length=1, max_length=1)]


class Weather(_Closed):
    """Asks for the weather."""

    city: _Name | None


USER: Any = {"role": "user", "content": "Tell me about a long river in Asia, and about its weather."}
FIELDS: dict[str, Any] = {"model": MODEL, "messages": [USER], "temperature": 0, "max_tokens": 150}
_ALONE: dict[str, Any] = {"parallel_tool_calls": False}
_ONE_CALL: dict[str, Any] = {"tool_choice": "required", **_ALONE}


def test_a_chat_its_stream_and_a_response_are_parsed_into_one_value(cluster: Cluster) -> None:
    with cluster.client() as client:
        whole = client.chat.completions.parse(**FIELDS, response_format=River).choices[0].message
        with client.chat.completions.stream(**FIELDS, response_format=River) as stream:
            events = list(stream)
            message = stream.get_final_completion().choices[0].message
        fields: dict[str, Any] = {"model": MODEL, "input": [USER], "temperature": 0, "max_output_tokens": 150}
        response = client.responses.parse(**fields, text_format=River)
    assert isinstance(whole.parsed, River)
    assert whole.parsed == message.parsed == response.output_parsed
    assert "".join(event.delta for event in events if event.type == "content.delta") == whole.content
    assert [event.parsed for event in events if event.type == "content.done"] == [whole.parsed]


def test_calls_whole_and_streamed_are_parsed_into_the_type_that_is_the_tool(cluster: Cluster) -> None:
    tools: Any = [openai.pydantic_function_tool(Weather)]
    with cluster.client() as client:
        [whole] = client.chat.completions.parse(**FIELDS, tools=tools, **_ONE_CALL).choices
        with client.chat.completions.stream(**FIELDS, tools=tools, **_ONE_CALL) as stream:
            events = list(stream)
            [choice] = stream.get_final_completion().choices
    [expected], [call] = whole.message.tool_calls or (), choice.message.tool_calls or ()
    assert whole.finish_reason == choice.finish_reason == "tool_calls"
    assert isinstance(expected.function.parsed_arguments, Weather)
    assert call.function == expected.function
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) > 3
    assert "".join(event.arguments_delta for event in pieces) == call.function.arguments
    [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, done.parsed_arguments) == ("Weather", call.function.parsed_arguments)


def test_one_of_two_types_that_are_tools_may_be_named(cluster: Cluster) -> None:
    tools: Any = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(City)]
    named: Any = {"type": "function", "function": {"name": "City"}}
    with cluster.client() as client:
        [choice] = client.chat.completions.parse(**FIELDS, tools=tools, tool_choice=named).choices
    [call] = choice.message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, City)


def test_output_that_was_cut_is_an_error_of_the_client_and_no_value(cluster: Cluster) -> None:
    with cluster.client() as client, pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**(FIELDS | {"max_tokens": 4}), response_format=River)


@pytest.fixture
def chain(cluster: Cluster) -> Iterator[Any]:
    """LangChain's model for OpenAI's API, with nothing of ours but its address."""
    with openai.DefaultHttpxClient() as http:
        yield langchain_openai.ChatOpenAI(
            base_url=f"{cluster.base_url}/v1",
            api_key="none",
            http_client=http,
            model=MODEL,
            temperature=0,
            max_tokens=150,
            max_retries=0,
            timeout=100,
        )


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_structured_output_by_either_method(chain: Any, method: str) -> None:
    answer = chain.with_structured_output(River, method=method, include_raw=True).invoke([USER])
    assert answer["parsing_error"] is None
    assert isinstance(answer["parsed"], River)
    assert bool(answer["raw"].tool_calls) == (method == "function_calling")


def get_weather(city: _Name) -> str:
    """The weather in a city."""
    return f"It is 21 degrees in {city}."


def get_time(zone: Annotated[int, Field(ge=0, le=23)]) -> str:
    """The time in a zone."""
    return f"It is {zone} o'clock."


def test_an_agent_of_langchain_calls_two_tools_and_then_answers(chain: Any) -> None:
    """The default model hardly calls anything by itself, so the loop says when it has to."""
    tools = {each.name: each for each in map(langchain_tools.tool, (get_weather, get_time))}
    messages, sizes = [USER], []
    for choice in ("any", "get_time"):
        answer = chain.bind_tools([*tools.values()], tool_choice=choice, strict=True, **_ALONE).invoke(messages)
        [call] = answer.tool_calls
        # The tool checks the arguments with pydantic, and its result names the call.
        result = tools[call["name"]].invoke(call)
        assert (result.status, result.tool_call_id) == ("success", call["id"])
        messages += [answer, result]
        sizes.append(answer.usage_metadata["input_tokens"])
    assert call["name"] == "get_time"
    last = chain.bind_tools([*tools.values()], tool_choice="none").invoke(messages, max_tokens=12)
    assert last.content
    assert not last.tool_calls
    # Each prompt has the call and the result before it.
    assert sizes[0] + 10 < sizes[1]
    assert sizes[1] + 10 < last.usage_metadata["input_tokens"]


def test_langchain_adds_the_pieces_of_a_streamed_call(chain: Any) -> None:
    bound = chain.bind_tools([get_time], tool_choice="required", strict=True, **_ALONE)
    first, *rest = bound.stream([USER])
    whole = sum(rest, start=first)
    [call] = whole.tool_calls
    assert call["name"] == "get_time"
    assert whole.invalid_tool_calls == []
    assert langchain_tools.tool(get_time).invoke(call["args"]).startswith("It is ")

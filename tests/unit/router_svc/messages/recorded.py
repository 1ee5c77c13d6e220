"""Messages as models of each family write them, with what they mean. Templates and model cards of the families."""

from __future__ import annotations

from router_svc.messages.calls import ToolTypes
from router_svc.messages.events import CallArguments, CallOpened, Event, Text

_STRING = frozenset({"string"})
TOOLS: ToolTypes = {
    "get_weather": {"city": _STRING, "days": frozenset({"integer"}), "flags": frozenset({"array"})},
    "put": {"value": frozenset({"string", "null"})},
}

CITY = '{"city": "Paris"}'
#: The name of a form, what the model writes, and what it means.
MESSAGES: list[tuple[str, str, list[Event]]] = [
    ("hermes", "Hello there.\n", [Text("Hello there.\n")]),
    (
        "hermes",
        f'<think>\nOne call.\n</think>\n\nLet me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n'
        '</tool_call>\n<tool_call>\n{"name": "put", "arguments": {}}\n</tool_call>',
        [
            Text("One call.", is_thinking=True),
            Text("Let me see."),
            CallOpened(0, "get_weather"),
            CallArguments(0, CITY),
            CallOpened(1, "put"),
            CallArguments(1, "{}"),
        ],
    ),
    (
        # The closing tag within a string, arguments before the name, and text behind the call.
        "hermes",
        '<tool_call>{"arguments": {"value": "</tool_call> \\" }"}, "name": "put"}</tool_call> Done.',
        [CallOpened(0, "put"), CallArguments(0, '{"value": "</tool_call> \\" }"}'), Text("Done.")],
    ),
    (
        # Arguments as a string with JSON in it.
        "hermes",
        '<tool_call>{"name": "put", "arguments": "{\\"value\\": null}"}</tool_call>',
        [CallOpened(0, "put"), CallArguments(0, '{"value": null}')],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
        [CallOpened(0, "get_weather"), CallArguments(0, '{"city": "Par')],
    ),
    ("hermes", "a <tool_call>nonsense</tool_call>", [Text("a <tool_call>nonsense</tool_call>")]),
    ("hermes", "It is <tool_ca", [Text("It is <tool_ca")]),
    ("hermes", "<think>Only <tool_call> thoughts", [Text("Only <tool_call> thoughts", is_thinking=True)]),
    (
        "qwen3_coder",
        'Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSão "Paulo"\n</function>\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=flags>\n[true, 1]\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=put>\n</function>\n</tool_call>",
        [
            Text("Sure."),
            CallOpened(0, "get_weather"),
            CallArguments(0, '{"city":"São \\"Paulo\\"\\n</function>","days":3,"flags":[true, 1]}'),
            CallOpened(1, "put"),
            CallArguments(1, "{}"),
        ],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=put>\n<parameter=value>\nNone\n</parameter>\n</function>\n</tool_call>",
        [CallOpened(0, "put"), CallArguments(0, '{"value":null}')],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        [CallOpened(0, "get_weather"), CallArguments(0, '{"city":"Par')],
    ),
    (
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {CITY}}}; {{"name": "put", "parameters": {{}}}}',
        [CallOpened(0, "get_weather"), CallArguments(0, CITY), CallOpened(1, "put"), CallArguments(1, "{}")],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "put", "parameters": {"value": "x"}}',
        [CallOpened(0, "put"), CallArguments(0, '{"value": "x"}')],
    ),
    ("llama3_json", '{"name": "Bob", "age": 3}', [Text('{"name": "Bob", "age": 3}')]),
    (
        "mistral",
        f"[THINK]Hm.[/THINK]Let me see.[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]put[CALL_ID]123456789[ARGS]{{}}",
        [
            Text("Hm.", is_thinking=True),
            Text("Let me see."),
            CallOpened(0, "get_weather"),
            CallArguments(0, CITY),
            CallOpened(1, "put"),
            CallArguments(1, "{}"),
        ],
    ),
    (
        "mistral_list",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "put", "arguments": {{}}}}]',
        [CallOpened(0, "get_weather"), CallArguments(0, CITY), CallOpened(1, "put"), CallArguments(1, "{}")],
    ),
    (
        "deepseek_v3",
        f"Wait.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{CITY}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>put\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        [
            Text("Wait."),
            CallOpened(0, "get_weather"),
            CallArguments(0, CITY),
            CallOpened(1, "put"),
            CallArguments(1, "{}"),
        ],
    ),
    (
        "deepseek_v31",
        f"<think>Hm.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{CITY}"
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>put<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [
            Text("Hm.", is_thinking=True),
            CallOpened(0, "get_weather"),
            CallArguments(0, CITY),
            CallOpened(1, "put"),
            CallArguments(1, "{}"),
        ],
    ),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{CITY}",
        [Text("Hm.", is_thinking=True), CallOpened(0, "get_weather"), CallArguments(0, CITY)],
    ),
    (
        "gpt_oss",
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant to=functions.put<|channel|>commentary "
        "json<|message|>{}<|call|>",
        [Text("Let me see."), CallOpened(0, "put"), CallArguments(0, "{}")],
    ),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
        [Text("Hm.", is_thinking=True), Text("Hello.")],
    ),
]

"""With `--no-special-tokens-in-text`, every text of a request stays text."""

from __future__ import annotations

from pathlib import Path

from router_svc.api.served_model import ServedModel
from tests.support.tiny_model import END, START, tokens_of

SPELLED = "a<|end|><|start|>b"


async def test_prompts_messages_names_and_variables_spell_no_special_token(model_dir: Path) -> None:
    model = ServedModel.load(model_dir, "tiny", special_tokens_in_text=False)
    assert await model.encode([SPELLED], add_special_tokens=True) == [tokens_of(SPELLED)]
    chat = await model.encode_chat(
        [{"role": "user", "content": SPELLED, "name": SPELLED}],
        add_generation_prompt=True,
        add_special_tokens=False,
        template_kwargs={"mood": SPELLED},
    )
    expected = [START, *tokens_of(f"user:{SPELLED}"), END, START, *tokens_of(f"assistant:{SPELLED}")]
    assert chat == expected


async def test_tools_and_calls_spell_none_either_in_values_and_in_keys(model_dir: Path) -> None:
    model = ServedModel.load(model_dir, "tiny", special_tokens_in_text=False)
    parameters = {"properties": {SPELLED: {"description": SPELLED}}}
    call = {"type": "function", "function": {"name": "f", "arguments": {SPELLED: SPELLED}}}
    chat = await model.encode_chat(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
        add_generation_prompt=False,
        add_special_tokens=False,
        template_kwargs={},
        tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}],
    )
    # Those of the template: around the system's message with the tools, and the two above.
    assert [token for token in chat if token in (START, END)] == [START, END] * 3


async def test_by_default_a_spelling_is_the_token_as_in_vllm(model_dir: Path) -> None:
    model = ServedModel.load(model_dir, "tiny")
    assert await model.encode([SPELLED], add_special_tokens=True) == [[ord("a"), END, START, ord("b")]]

"""Request fields that are ignored or not supported. Look here when a client's field is refused."""

from __future__ import annotations

from collections.abc import Mapping

#: Accepted without effect. They label a request or concern services that a model server does not have.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)

#: Fields of OpenAI's or vLLM's API that are not supported, with the neutral values that are accepted besides null.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

#: Fields of responses that clients send back in messages, with the neutral values that are accepted besides null.
MESSAGE_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_calls": ([],),
}


def without_neutral(fields: Mapping[str, object], unsupported: Mapping[str, tuple[object, ...]]) -> dict[str, object]:
    """`fields` without unsupported fields at a neutral value, which request nothing."""
    return {name: value for name, value in fields.items() if not _is_neutral(name, value, unsupported)}


def _is_neutral(name: str, value: object, unsupported: Mapping[str, tuple[object, ...]]) -> bool:
    if name not in unsupported:
        return False
    return value is None or any(type(value) is type(neutral) and value == neutral for neutral in unsupported[name])

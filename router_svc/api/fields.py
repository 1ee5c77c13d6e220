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
    }
)

#: Fields of OpenAI's or vLLM's API that are not supported, with the neutral values that are accepted besides null.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": ("",),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 1.0),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": ([],),
    "reasoning_effort": ("none",),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

#: Reasons that a client may want to know.
UNSUPPORTED_BECAUSE: Mapping[str, str] = {
    "suffix": "models that continue a text do not fill the gap before another one",
}

#: Fields of responses that clients send back in messages, with the neutral values that are accepted besides null.
MESSAGE_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": ("",),
}


def without_neutral(fields: Mapping[str, object], unsupported: Mapping[str, tuple[object, ...]]) -> dict[str, object]:
    """`fields` without unsupported fields at a neutral value, which request nothing."""
    return {name: value for name, value in fields.items() if not _is_neutral(name, value, unsupported)}


def _is_neutral(name: str, value: object, unsupported: Mapping[str, tuple[object, ...]]) -> bool:
    if name not in unsupported:
        return False
    return value is None or any(type(value) is type(neutral) and value == neutral for neutral in unsupported[name])

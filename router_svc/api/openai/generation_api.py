"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

from router_svc.api.event_ids import EventIds
from router_svc.api.event_stream import Formatter
from router_svc.api.generations import CHAT, COMPLETIONS
from router_svc.api.openai.chat_format import ChatFormat
from router_svc.api.openai.completion_format import CompletionFormat
from router_svc.api.openai.generation_request import GenerationRequest, chat_request, completion_request
from router_svc.api.openai.prompt_logprobs import ScoredPrompt
from router_svc.api.openai.schema import ChatBody, CompletionBody
from router_svc.api.openai.shapes import ResponseFormatter
from router_svc.api.responder import FormatterOf, GeneratingEndpoint, Responder


def _completion_formatter(responder: Responder) -> FormatterOf:
    def formatter(generation: GenerationRequest, ids: EventIds | None) -> Formatter:
        return ResponseFormatter(generation, CompletionFormat(generation, responder.tokenizer(generation)), ids)

    return formatter


def _chat_formatter(responder: Responder) -> FormatterOf:
    def formatter(generation: GenerationRequest, ids: EventIds | None) -> Formatter:
        prompts = generation.prompts_of_choices
        scored, alternatives = None, generation.prompt_logprobs
        if alternatives is not None:
            scored = ScoredPrompt(token_ids=generation.generations[0].prompt, alternatives=alternatives)
        tokenizer = responder.tokenizer(generation)
        choices = ChatFormat(tokenizer, generation.response_id, generation.reading, prompts, scored)
        return ResponseFormatter(generation, choices, ids)

    return formatter


COMPLETION = GeneratingEndpoint(
    endpoint=COMPLETIONS,
    id_prefix="cmpl-",
    body=CompletionBody,
    make=completion_request,
    formatter=_completion_formatter,
)
CHAT_COMPLETION = GeneratingEndpoint(
    endpoint=CHAT, id_prefix="chatcmpl-", body=ChatBody, make=chat_request, formatter=_chat_formatter
)

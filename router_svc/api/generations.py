"""Makes generations from validated fields, for every API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pdserve.base.sampling import check_sampling
from pdserve.base.tasks import in_turns
from router_svc.api.body import SamplingFields
from router_svc.api.ids import Ids
from router_svc.api.sampling import (
    EndpointFields,
    require_bounded,
    require_few_scores,
    require_token,
    sampling_params,
    text_rules,
)
from router_svc.api.served_model import ServedModel, require_fits
from router_svc.generation import Generation

#: OpenAI's default for completions.
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An API endpoint that generates."""

    #: Name in the decision record.
    name: str
    #: Field that holds the prompt, for errors.
    prompt_param: str


COMPLETIONS = Endpoint(name="/v1/completions", prompt_param="prompt")
CHAT = Endpoint(name="/v1/chat/completions", prompt_param="messages")
RESPONSES = Endpoint(name="/v1/responses", prompt_param="input")
MESSAGES = Endpoint(name="/v1/messages", prompt_param="messages")
OLLAMA_CHAT = Endpoint(name="/api/chat", prompt_param="messages")
OLLAMA_GENERATE = Endpoint(name="/api/generate", prompt_param="prompt")
GRPC = Endpoint(name="grpc", prompt_param="prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFactory:
    """Makes the generations of one client request, for the model that it names."""

    model: ServedModel
    max_model_len: int
    ids: Ids
    endpoint: Endpoint
    #: Fields that the client has sent, and that mean nothing to the model. Answers name them, errors too.
    ignored_fields: list[str] = field(default_factory=list)

    async def make(
        self, fields: SamplingFields, own_fields: EndpointFields, prompts: Sequence[list[int]]
    ) -> tuple[Generation, ...]:
        """One generation per prompt, in order. Raises `RequestError`."""
        generations = []
        async for index, prompt in in_turns(enumerate(prompts)):
            require_fits(len(prompt), self.max_model_len, param=self.endpoint.prompt_param)
            sampling = sampling_params(
                fields, own_fields, self.model, prompt_tokens=len(prompt), max_model_len=self.max_model_len
            )
            generations.append(
                Generation(
                    request_id=self.ids.of_prompt(index),
                    worker_request_id=self.ids.for_workers(index),
                    prompt=tuple(prompt),
                    sampling=sampling,
                    text=text_rules(fields, own_fields, self.model.defaults),
                    first_choice=index * sampling.n,
                    prompt_logprobs=own_fields.prompt_logprobs,
                    priority=own_fields.priority,
                    cache_salt=own_fields.cache_salt.encode(),
                    endpoint=self.endpoint.name,
                )
            )
        params = [generation.sampling for generation in generations]
        require_token(params[0], self.model)  # The others differ in `max_tokens` and `seed` only.
        # A request for no token at all is the router's own: no worker gets its parameters.
        check_sampling(replace(params[0], max_tokens=max(1, params[0].max_tokens)), self.model.vocab_size)
        require_bounded(params)
        require_few_scores(sum(map(len, prompts)), params[0], own_fields.prompt_logprobs)
        return tuple(generations)

"""Makes generations from validated fields, for every API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.base.errors import NotFound
from pdserve.base.sampling import check_sampling
from pdserve.base.tasks import in_turns
from router_svc.api.body import SamplingFields
from router_svc.api.ids import Ids
from router_svc.api.sampling import EndpointFields, require_bounded, sampling_params, text_rules
from router_svc.api.served_model import ServedModel, require_fits
from router_svc.generation import Generation

#: OpenAI's default for completions.
DEFAULT_MAX_TOKENS = 16


def require_model(requested: str | None, model: ServedModel) -> None:
    """Raises `NotFound` for any other model than the one served."""
    if requested is not None and requested != model.name:
        raise NotFound(f"The model `{requested[:100]}` does not exist. This server has `{model.name}`.", param="model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An API endpoint that generates."""

    #: Name in the decision record.
    name: str
    #: Field that holds the prompt, for errors.
    prompt_param: str


COMPLETIONS = Endpoint(name="/v1/completions", prompt_param="prompt")
CHAT = Endpoint(name="/v1/chat/completions", prompt_param="messages")
GRPC = Endpoint(name="grpc", prompt_param="prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFactory:
    """Makes the generations of one client request."""

    model: ServedModel
    max_model_len: int
    ids: Ids
    endpoint: Endpoint
    priority: int = 0
    cache_salt: str = ""

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
                    text=text_rules(fields),
                    first_choice=index * sampling.n,
                    priority=self.priority,
                    cache_salt=self.cache_salt.encode(),
                    endpoint=self.endpoint.name,
                )
            )
        params = [generation.sampling for generation in generations]
        check_sampling(params[0], self.model.vocab_size)  # The others differ in `max_tokens` and `seed` only.
        require_bounded(params)
        return tuple(generations)

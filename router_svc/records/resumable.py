"""What is kept of a stream that another router may have to resume: the request as admitted, and its output. Pure.

The output is a function of the request, so what was not kept of it is made again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError
from pydantic import ValidationError

from pdserve.base.errors import TransferError, Unreadable
from pdserve.base.ids import RequestId
from pdserve.base.layout import KvLayout
from pdserve.base.layout_wire import layout_from_record, layout_to_record
from pdserve.base.sampling import ChoiceTokens
from pdserve.base.wire import sampling_from_wire, sampling_to_wire, tokens_from_wire, tokens_to_wire
from pdserve.v1 import resume_pb2 as pb
from router_svc.generation import Generation, TextRules
from router_svc.records.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseShape:
    """What decides the bytes of a response beside its tokens."""

    response_id: str
    #: X-Request-Id.
    header_id: str
    model: str
    #: Unix time.
    created: int
    include_usage: bool
    continuous_usage: bool
    echoes: tuple[str, ...] = ()
    #: How a chat's messages are read, as JSON; empty: as plain text.
    reading: str = ""
    return_token_ids: bool = False
    #: What the response repeats of its request, as JSON, where the endpoint's does.
    request_fields: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumable:
    """One client request as it was admitted."""

    shape: ResponseShape
    generations: tuple[Generation, ...]
    #: Commit of the model's repository; empty for a model of no hub.
    model_revision: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """Tokens of one prompt that were passed on together: one each, or an end without a token."""

    prompt_index: int
    choices: tuple[ChoiceTokens, ...]
    #: Prompt tokens that were cached, as the client is shown them.
    cached_tokens: int
    #: KV layout of the worker; None: as in the step before.
    layout: KvLayout | None = None
    #: Its numerics class; None: as in the step before.
    numerics_class: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What routers have charged for a stream before: to the tenant's usage, and to the key's limits in tokens."""

    usage: Usage = field(default_factory=Usage)
    limit_tokens: int = 0

    def to_text(self) -> str:
        """The numbers with spaces between them."""
        return " ".join(map(str, (*self.usage.values(), self.limit_tokens)))

    @classmethod
    def from_text(cls, text: bytes) -> Charge:
        """The charge of a text. Raises `Unreadable`."""
        try:
            requests, inputs, cached, outputs, limit_tokens = map(int, text.split())
        except ValueError as error:
            raise _unreadable(error) from error
        usage = Usage(requests=requests, input_tokens=inputs, cached_tokens=cached, output_tokens=outputs)
        return cls(usage=usage, limit_tokens=limit_tokens)


def request_to_bytes(resumable: Resumable) -> bytes:
    """The request as bytes."""
    shape = resumable.shape
    return pb.ResumableRequest(
        response_id=shape.response_id,
        header_id=shape.header_id,
        endpoint=resumable.generations[0].endpoint,
        model=shape.model,
        created=shape.created,
        include_usage=shape.include_usage,
        continuous_usage=shape.continuous_usage,
        echoes=shape.echoes,
        prompts=map(_prompt, resumable.generations),
        model_revision=resumable.model_revision,
        reading=shape.reading,
        return_token_ids=shape.return_token_ids,
        request_fields=shape.request_fields,
    ).SerializeToString()


def _prompt(generation: Generation) -> pb.ResumablePrompt:
    return pb.ResumablePrompt(
        token_ids=generation.prompt,
        sampling=sampling_to_wire(generation.sampling),
        stop=generation.text.stop,
        include_stop_str_in_output=generation.text.include_stop_str_in_output,
        skip_special_tokens=generation.text.skip_special_tokens,
        priority=generation.priority,
        cache_salt=generation.cache_salt,
        request_id=generation.request_id,
        kept_token_ids=generation.text.kept_tokens,
        unfinished=generation.text.unfinished,
    )


def request_from_bytes(data: bytes, *, suffix: str) -> Resumable:
    """The request of these bytes. Workers get its ids with `suffix`, which makes them new. Raises `Unreadable`."""
    try:
        message = pb.ResumableRequest.FromString(data)
        generations: list[Generation] = []
        first_choice = 0
        for prompt in message.prompts:
            generations.append(_generation(prompt, message.endpoint, first_choice, suffix))
            first_choice += prompt.sampling.n
        if not generations:
            raise ValueError("it has no prompt")
    except (DecodeError, ValueError) as error:
        raise _unreadable(error) from error
    shape = ResponseShape(
        response_id=message.response_id,
        header_id=message.header_id,
        model=message.model,
        created=message.created,
        include_usage=message.include_usage,
        continuous_usage=message.continuous_usage,
        echoes=tuple(message.echoes),
        reading=message.reading,
        return_token_ids=message.return_token_ids,
        request_fields=message.request_fields,
    )
    return Resumable(shape=shape, generations=tuple(generations), model_revision=message.model_revision)


def _generation(prompt: pb.ResumablePrompt, endpoint: str, first_choice: int, suffix: str) -> Generation:
    return Generation(
        request_id=RequestId(prompt.request_id),
        worker_request_id=RequestId(f"{prompt.request_id}-{suffix}"),
        prompt=tuple(prompt.token_ids),
        sampling=sampling_from_wire(prompt.sampling),
        text=TextRules(
            stop=tuple(prompt.stop),
            include_stop_str_in_output=prompt.include_stop_str_in_output,
            skip_special_tokens=prompt.skip_special_tokens,
            kept_tokens=tuple(prompt.kept_token_ids),
            unfinished=prompt.unfinished if prompt.HasField("unfinished") else None,
        ),
        first_choice=first_choice,
        priority=prompt.priority,
        cache_salt=prompt.cache_salt,
        endpoint=endpoint,
    )


def steps_to_bytes(steps: Iterable[LoggedStep]) -> bytes:
    """Steps as bytes."""
    return pb.OutputLog(
        steps=[
            pb.OutputStep(
                prompt_index=step.prompt_index,
                choices=map(tokens_to_wire, step.choices),
                cached_tokens=step.cached_tokens,
                layout="" if step.layout is None else json.dumps(layout_to_record(step.layout)),
                numerics_class=step.numerics_class or "",
            )
            for step in steps
        ]
    ).SerializeToString()


def steps_from_bytes(data: bytes) -> Iterator[LoggedStep]:
    """The steps of these bytes, each read when its turn comes. Raises `Unreadable`."""
    try:
        for step in pb.OutputLog.FromString(data).steps:
            yield LoggedStep(
                prompt_index=step.prompt_index,
                choices=tuple(map(tokens_from_wire, step.choices)),
                cached_tokens=step.cached_tokens,
                layout=layout_from_record(step.layout.encode()) if step.layout else None,
                numerics_class=step.numerics_class or None,
            )
    except (DecodeError, TransferError, ValidationError, ValueError) as error:
        raise _unreadable(error) from error


def single_tokens(chunks: Iterable[ChoiceTokens]) -> Iterable[ChoiceTokens]:
    """The same tokens, one each: a stream that was resumed has the same events, however its workers sent tokens."""
    for chunk in chunks:
        last = len(chunk.token_ids) - 1
        if last <= 0:
            yield chunk
            continue
        for position, token_id in enumerate(chunk.token_ids):
            yield ChoiceTokens(
                choice_index=chunk.choice_index,
                first_index=chunk.first_index + position,
                token_ids=(token_id,),
                logprobs=chunk.logprobs[position : position + 1],
                finish_reason=chunk.finish_reason if position == last else None,
                stop_token_id=chunk.stop_token_id if position == last else None,
            )


def _unreadable(error: Exception) -> Unreadable:
    return Unreadable(f"The stream in Redis cannot be read: {error!r:.300}.")

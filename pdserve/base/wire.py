"""Conversion of sampling parameters, tokens and errors to and from protobuf messages."""

from __future__ import annotations

from pdserve.base.errors import Overloaded, PdserveError, RequestError, TransferError, error_classes
from pdserve.base.sampling import ChoiceTokens, FinishReason, SamplingParams, TokenLogprobs
from pdserve.v1 import common_pb2 as pb

_FINISH_TO_WIRE = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
#: Longest wait before a retry that another process may report.
_MAX_WAIT_S = 86_400.0
_FINISH_FROM_WIRE = {wire: value for value, wire in _FINISH_TO_WIRE.items()}


def sampling_to_wire(params: SamplingParams) -> pb.SamplingParams:
    """The message for `params`."""
    message = pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
        max_tokens=params.max_tokens,
        seed=params.seed,
        n=params.n,
    )
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    return message


def sampling_from_wire(message: pb.SamplingParams) -> SamplingParams:
    """The value of a message that the router made."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
        max_tokens=message.max_tokens,
        seed=message.seed,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        n=message.n,
    )


def tokens_to_wire(tokens: ChoiceTokens) -> pb.ChoiceTokens:
    """The message for some tokens of one choice."""
    message = pb.ChoiceTokens(
        choice_index=tokens.choice_index,
        first_index=tokens.first_index,
        token_ids=tokens.token_ids,
        logprobs=[logprobs_to_wire(entry) for entry in tokens.logprobs],
        finish_reason=_FINISH_TO_WIRE[tokens.finish_reason],
    )
    if tokens.stop_token_id is not None:
        message.stop_token_id = tokens.stop_token_id
    return message


def tokens_from_wire(message: pb.ChoiceTokens) -> ChoiceTokens:
    """The value of a worker's message. Raises `TransferError` for one that no worker of ours sends."""
    if message.finish_reason not in _FINISH_FROM_WIRE:
        raise TransferError(f"A worker sent tokens with the unknown finish reason {message.finish_reason}.")
    return ChoiceTokens(
        choice_index=message.choice_index,
        first_index=message.first_index,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(_logprobs_from_wire(entry) for entry in message.logprobs),
        finish_reason=_FINISH_FROM_WIRE[message.finish_reason],
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
    )


def logprobs_to_wire(value: TokenLogprobs) -> pb.TokenLogprobs:
    """The message for one token's log-probabilities."""
    return pb.TokenLogprobs(
        logprob=value.logprob, rank=value.rank, top_ids=value.top_ids, top_logprobs=value.top_logprobs
    )


def _logprobs_from_wire(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=message.logprob,
        rank=message.rank,
        top_ids=tuple(message.top_ids),
        top_logprobs=tuple(message.top_logprobs),
    )


def error_to_wire(error: PdserveError) -> pb.Error:
    """The message for an error."""
    message = pb.Error(name=type(error).__name__, text=str(error))
    if isinstance(error, RequestError) and error.param is not None:
        message.param = error.param
    if isinstance(error, Overloaded):
        message.retry_after_s = error.retry_after_s
    return message


def error_from_wire(message: pb.Error) -> PdserveError:
    """The error of a message. For a class that is unknown here, only the text is kept."""
    cls = error_classes().get(message.name, PdserveError)
    if issubclass(cls, Overloaded):
        return cls(message.text, retry_after_s=reported_wait(message.retry_after_s))
    if issubclass(cls, RequestError):
        return cls(message.text, param=message.param if message.HasField("param") else None)
    return cls(message.text)


def reported_wait(seconds: float | str) -> float:
    """The wait before a retry that another process reported, in seconds; 1 for what is none."""
    try:
        wait_s = float(seconds)
    except ValueError:
        return 1.0
    return wait_s if 0 <= wait_s <= _MAX_WAIT_S else 1.0

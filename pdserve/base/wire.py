"""Conversion of parameters, tokens and errors to and from protobuf messages."""

from __future__ import annotations

from pdserve.base.errors import Overloaded, PdserveError, RequestError, TransferError, error_classes
from pdserve.base.pooling import Pooling, PoolingKind
from pdserve.base.sampling import ChoiceTokens, FinishReason, SamplingParams, ThinkingBudget, TokenLogprobs
from pdserve.v1 import common_pb2 as pb
from pdserve.v1 import prefill_pb2

_FINISH_TO_WIRE = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_KIND_TO_WIRE = {
    PoolingKind.LAST: prefill_pb2.POOLING_KIND_LAST,
    PoolingKind.CLS: prefill_pb2.POOLING_KIND_CLS,
    PoolingKind.MEAN: prefill_pb2.POOLING_KIND_MEAN,
}
_KIND_FROM_WIRE = {wire: kind for kind, wire in _KIND_TO_WIRE.items()}
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
        grammar=params.grammar,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=[pb.TokenSequence(token_ids=word) for word in params.bad_words],
        logprob_token_ids=params.logprob_token_ids,
    )
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    if params.thinking is not None:
        message.thinking.CopyFrom(
            pb.ThinkingBudget(
                max_tokens=params.thinking.max_tokens,
                is_open=params.thinking.is_open,
                opening=params.thinking.opening,
                closings=params.thinking.closings,
                closing_token_ids=params.thinking.closing_token_ids,
            )
        )
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
        grammar=message.grammar,
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        logprob_token_ids=tuple(message.logprob_token_ids),
        thinking=_thinking_from_wire(message.thinking) if message.HasField("thinking") else None,
    )


def _thinking_from_wire(message: pb.ThinkingBudget) -> ThinkingBudget:
    return ThinkingBudget(
        max_tokens=message.max_tokens,
        is_open=message.is_open,
        opening=message.opening,
        closings=tuple(message.closings),
        closing_token_ids=tuple(message.closing_token_ids),
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
        logprobs=tuple(logprobs_from_wire(entry) for entry in message.logprobs),
        finish_reason=_FINISH_FROM_WIRE[message.finish_reason],
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
    )


def logprobs_to_wire(value: TokenLogprobs) -> pb.TokenLogprobs:
    """The message for one token's log-probabilities."""
    return pb.TokenLogprobs(
        logprob=value.logprob, rank=value.rank, top_ids=value.top_ids, top_logprobs=value.top_logprobs
    )


def logprobs_from_wire(message: pb.TokenLogprobs) -> TokenLogprobs:
    """The value of a worker's message."""
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


def pooling_to_wire(pooling: Pooling) -> prefill_pb2.Pooling:
    """The message for `pooling`."""
    return prefill_pb2.Pooling(
        kind=_KIND_TO_WIRE[pooling.kind], dimensions=pooling.dimensions, normalizes=pooling.normalizes
    )


def pooling_from_wire(message: prefill_pb2.Pooling) -> Pooling:
    """The value of a message. Raises `RequestError` for a kind that is not known here."""
    kind = _KIND_FROM_WIRE.get(message.kind)
    if kind is None:
        raise RequestError(f"The pooling {message.kind} is unknown to this worker. Update the worker.", param="pooling")
    return Pooling(kind=kind, dimensions=message.dimensions, normalizes=message.normalizes)

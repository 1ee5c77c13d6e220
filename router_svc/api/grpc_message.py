"""Parses a GenerateRequest within limits that are checked before anything is built from its bytes.

Parsing is one call on the event loop. A text of megabytes takes it no time, but as many token ids or biases would: so
the sizes of a message's parts are read from its encoding first.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from pdserve.base.errors import RequestError, TooLarge
from pdserve.v1 import inference_pb2 as pb
from router_svc.api.openai.schema import MAX_PROMPTS

#: Bytes of `sampling`: four stop strings, 300 biases and 64 token ids have less than 10 KiB, and 16,384 ids that are
#: allowed less than 48 KiB.
MAX_SAMPLING_BYTES = 131_072
#: Fields of the message itself, repeated or unknown ones included.
_MAX_FIELDS = 64
#: Bytes of an encoded token id, at most.
_BYTES_PER_ID = 5
_MAX_VARINT_BYTES = 10
#: Bytes of a ResumeRequest: an id, and the position in up to 512 choices.
_MAX_RESUME_BYTES = 16_384
_MAX_CANCEL_BYTES = 1024
_TOKEN_IDS = pb.GenerateRequest.DESCRIPTOR.fields_by_name["token_ids"].number
_INPUTS = pb.EmbedRequest.DESCRIPTOR.fields_by_name["inputs"].number
_INPUT_TOKEN_IDS = pb.EmbedInput.DESCRIPTOR.fields_by_name["token_ids"].number
_SAMPLING = pb.GenerateRequest.DESCRIPTOR.fields_by_name["sampling"].number


def parse_cancel(data: bytes) -> pb.CancelRequest:
    """The message. Raises `RequestError`."""
    if len(data) > _MAX_CANCEL_BYTES:
        raise TooLarge(f"The message has {len(data)} bytes (limit {_MAX_CANCEL_BYTES}). Send an id and nothing else.")
    try:
        return pb.CancelRequest.FromString(data)
    except DecodeError:
        raise RequestError("The message is no CancelRequest.") from None


def parse_request(data: bytes, max_model_len: int) -> pb.GenerateRequest:
    """The message. Raises `RequestError` for one that is not valid, or has more than any request needs."""
    try:
        for number, num_bytes, _ in _fields(data):
            if number == _TOKEN_IDS and num_bytes > _BYTES_PER_ID * max_model_len + _MAX_VARINT_BYTES:
                raise TooLarge(
                    f"`token_ids` has {num_bytes} bytes, but the context holds {max_model_len} tokens, including the "
                    "completion. Shorten the prompt.",
                    param="prompt",
                )
            if number == _SAMPLING and num_bytes > MAX_SAMPLING_BYTES:
                raise TooLarge(
                    f"`sampling` has {num_bytes} bytes (limit {MAX_SAMPLING_BYTES}). Remove biases or stop strings.",
                    param="sampling",
                )
        return pb.GenerateRequest.FromString(data)
    except (DecodeError, IndexError) as error:
        raise RequestError("The message is not a valid GenerateRequest. Encode it with inference.proto.") from error


def parse_embed(data: bytes, max_model_len: int) -> pb.EmbedRequest:
    """The message. Raises `RequestError` for one that is not valid, or has more than any request needs."""
    limit = _BYTES_PER_ID * max_model_len + _MAX_VARINT_BYTES
    try:
        inputs = [each for each in _fields(data, MAX_PROMPTS + _MAX_FIELDS) if each[0] == _INPUTS]
        for _, num_bytes, start in inputs:
            for kind, size, _ in _fields(data[start : start + num_bytes]):
                if kind == _INPUT_TOKEN_IDS and size > limit:
                    raise TooLarge(
                        f"An input has {size} bytes of token ids, but the context holds {max_model_len} tokens. "
                        "Shorten it.",
                        param="inputs",
                    )
        return pb.EmbedRequest.FromString(data)
    except (DecodeError, IndexError) as error:
        raise RequestError("The message is not a valid EmbedRequest. Encode it with inference.proto.") from error


def parse_resume(data: bytes) -> pb.ResumeRequest:
    """The message. Raises `RequestError`."""
    try:
        if len(data) > _MAX_RESUME_BYTES:
            raise TooLarge(f"The message has {len(data)} bytes (limit {_MAX_RESUME_BYTES}). Send an id and a position.")
        return pb.ResumeRequest.FromString(data)
    except DecodeError as error:
        raise RequestError("The message is not a valid ResumeRequest. Encode it with inference.proto.") from error


def _fields(data: bytes, limit: int = _MAX_FIELDS) -> list[tuple[int, int, int]]:
    """Number, size in bytes and start of the message's own fields. Raises IndexError past the end of the message."""
    fields: list[tuple[int, int, int]] = []
    position = 0
    while position < len(data):
        if len(fields) == limit:
            raise TooLarge(f"The message has more than {limit} fields. Send each field once.")
        tag, position = _varint(data, position)
        size, start = _size(data, position, tag & 7)
        fields.append((tag >> 3, size, start))
        position = start + size
    return fields


def _size(data: bytes, position: int, wire_type: int) -> tuple[int, int]:
    """Size and start of a field's value."""
    match wire_type:
        case 0:
            return _varint(data, position)[1] - position, position
        case 1:
            return 8, position
        case 2:
            return _varint(data, position)
        case 5:
            return 4, position
    raise IndexError


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A variable-length integer, and the position after it."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        byte = data[position + index]
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, position + index + 1
    raise IndexError

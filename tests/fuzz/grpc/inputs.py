"""Inputs of this area: a message for `Generate`, a call of any method, or bytes for the port."""

from __future__ import annotations

from random import Random

from pdserve.v1 import inference_pb2 as pb
from tests.fuzz.files.mutations import damaged_bytes
from tests.fuzz.messages import damaged_message
from tests.support.tiny_model import NAME

_SAMPLING = pb.ClientSampling(
    temperature=0.7, top_p=0.9, top_k=5, logit_bias={65: 1.5}, stop=["wor"], stop_token_ids=[9], seed=7, logprobs=2, n=2
)
#: Calls that are valid.
_SEEDS = (
    pb.GenerateRequest(model=NAME, text="Say hello", sampling=pb.ClientSampling(max_tokens=50)),
    pb.GenerateRequest(model=NAME, token_ids=pb.TokenIds(ids=[72, 105]), sampling=_SAMPLING),
    pb.GenerateRequest(model=NAME, text="x" * 200, request_id="a-client-s", priority=3, cache_salt="salt"),
)
METHODS = (
    "/pdserve.v1.InferenceService/Generate",
    "/pdserve.v1.InferenceService/Resume",
    "/pdserve.v1.InferenceService/Embed",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/pdserve.v1.DecodeService/Commit",
    "/pdserve.v1.InferenceService/Other",
    "/",
    "/a/b/c",
    "//",
)
_TRACE = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
METADATA: tuple[tuple[tuple[str, str | bytes], ...], ...] = (
    (),
    (("traceparent", f"00-{_TRACE}-01"),),
    (("traceparent", f"ff-{_TRACE}-01"),),
    (("traceparent", "00-" + "0" * 32 + "-b7ad6b7169203331-01"),),
    (("traceparent", "-" * 300), ("traceparent", f"00-{_TRACE}-00")),
    (("traceparent", f"cc-{_TRACE}-09-more"),),
    (("authorization", "Bearer"), ("x-api-key", "")),
    (("authorization", "Basic " + "x" * 1000),),
    (("x-request-id", "../../x"), ("pdserve-error", "PdserveError"), ("grpc-timeout-x", "1")),
    (("some-bin", b"\xff\x00"), ("a" * 200, "b" * 2000)),
)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def generate(random: Random) -> bytes:
    """A message for `Generate`."""
    return damaged_message(random.choice(_SEEDS), random)


def call(random: Random) -> bytes:
    """A call: number of its method, number of its metadata, and its message."""
    seed = random.choice((b"", b"\x0a\x00", b"\x0a\x02ab", b"\x3a\x00", b"\xff", _SEEDS[0].SerializeToString()))
    message = damaged_bytes(seed, random) if random.random() < 0.7 else seed + random.randbytes(random.randrange(40))
    return bytes((random.randrange(len(METHODS)), random.randrange(len(METADATA)))) + message


def port(random: Random) -> bytes:
    """HTTP/2 with damage, or something else."""
    kind = random.randrange(6)
    if kind == 0:
        return random.randbytes(random.choice((1, 9, 24, 300)))
    if kind == 1:
        return b"GET / HTTP/1.1\r\nHost: " + b"x" * random.choice((1, 9000)) + b"\r\n\r\n"
    frames = [_frame(4, 0, 0, b"")]
    for number in range(random.randint(1, 6)):
        stream = random.choice((0, 1, 1, 1, 2 * number + 1, 2**31 - 1))
        flags = random.choice((0, 1, 4, 5, 0x25, 0xFF))
        kind_of_frame = random.choice((0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 255))
        frames.append(_frame(kind_of_frame, flags, stream, _payload(kind_of_frame, random)))
    data = (_PREFACE if random.random() < 0.9 else _PREFACE[:-3]) + b"".join(frames)
    return damaged_bytes(data, random) if random.random() < 0.5 else data


def _payload(kind: int, random: Random) -> bytes:
    if kind == 1:
        fields = {
            b":method": b"POST",
            b":scheme": b"http",
            b":path": random.choice(METHODS).encode(),
            b":authority": b"x",
            b"content-type": b"application/grpc",
            b"te": b"trailers",
            b"grpc-timeout": random.choice((b"1S", b"99999999H", b"-1S", b"x")),
            b"x" * random.choice((1, 100)): b"y" * random.choice((1, 120)),
        }
        return b"".join(
            b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in fields.items()
        )
    if kind == 0:
        message = random.choice(_SEEDS).SerializeToString()
        length = random.choice((len(message), 0, 2**32 - 1, 2**24))
        return bytes((random.choice((0, 1, 2)),)) + length.to_bytes(4, "big") + message
    if kind == 4:
        return bytes((0, random.randrange(1, 9))) + random.choice((0, 1, 2**31, 2**32 - 1)).to_bytes(4, "big")
    return random.randbytes(random.choice((0, 4, 5, 8, 64)))


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload

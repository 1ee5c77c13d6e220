"""Cost of the cluster secret: what sealing and opening the messages of one request takes, by the length of its prompt.

    python -m benchmarks.seals [--repeats 2000] [--out benchmarks/results]

Each case is the median of `--repeats` runs on one thread. Without a secret the same messages are serialized and parsed
as they are; the difference is what a secret costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import environment
from benchmarks.result_files import write_results
from pdserve.base.ids import WorkerId, new_epoch
from pdserve.base.sampling import SamplingParams
from pdserve.base.wire import sampling_to_wire
from pdserve.peers.seals import Purpose, Seals, receiver_name
from pdserve.peers.secret import new_secret, parse_secret
from pdserve.v1.common_pb2 import RequestRef
from pdserve.v1.decode_pb2 import CommitRequest, DecodeStart, Ticket
from pdserve.v1.prefill_pb2 import PrefillRequest

PROMPTS = (16, 1024, 8192, 131_072)
BLOCK_SIZE = 16
RECEIVER = receiver_name(WorkerId("decode-0"), new_epoch())


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Microseconds for all messages of one handed-over request, at all processes together."""

    prompt_tokens: int
    open_us: float
    sealed_us: float

    @property
    def cost_us(self) -> float:
        """What the secret adds."""
        return self.sealed_us - self.open_us


def one_request(seals: Seals, prompt_tokens: int) -> Callable[[], None]:
    """Makes, seals, sends, receives and opens the four messages of a request."""
    ref = RequestRef(request_id="cmpl-0123456789abcdef0123456789abcdef", attempt=1, router_id="0123456789abcdef")
    prompt = [(7 * position) % 49_152 for position in range(prompt_tokens)]
    sampling = sampling_to_wire(SamplingParams(temperature=0.0, max_tokens=128, seed=1))
    blocks = -(-prompt_tokens // BLOCK_SIZE)
    start = DecodeStart(ref=ref, prompt_token_ids=prompt, sampling=sampling)
    ticket = Ticket(transfer_id=bytes(16), worker_id="decode-0", data_address=bytes(300), key=bytes(32))
    commit = CommitRequest(
        ref=ref, transfer_id=bytes(16), digests=[bytes(16)] * blocks, first_tokens=[1], mac=bytes(32)
    )

    def run() -> None:
        sent = seals.seal(Purpose.START, RECEIVER, start).SerializeToString()
        seals.open(Purpose.START, RECEIVER, DecodeStart.FromString(sent))
        granted = Ticket.FromString(ticket.SerializeToString())
        sealed = seals.seal(Purpose.TICKET, b"r", ticket, once=False)
        if sealed is not ticket:
            granted.sealed.CopyFrom(sealed.sealed)
        request = PrefillRequest(ref=ref, prompt_token_ids=prompt, sampling=sampling, ticket=granted)
        sent = seals.seal(Purpose.PROMPT, RECEIVER, request).SerializeToString()
        opened = seals.open(Purpose.PROMPT, RECEIVER, PrefillRequest.FromString(sent))
        seals.open(Purpose.TICKET, b"r", opened.ticket, once=False)
        sent = seals.seal(Purpose.COMMIT, RECEIVER, commit).SerializeToString()
        seals.open(Purpose.COMMIT, RECEIVER, CommitRequest.FromString(sent))

    return run


def median_us(run: Callable[[], None], repeats: int) -> float:
    """Median duration of `run` in microseconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - started)
    return round(statistics.median(times) / 1000, 1)


def measure(prompt_tokens: int, repeats: int) -> Case:
    """One case."""
    secret = parse_secret(new_secret(), where="the benchmark")
    repeats = max(20, min(repeats, repeats * 1024 // prompt_tokens))
    return Case(
        prompt_tokens=prompt_tokens,
        open_us=median_us(one_request(Seals(), prompt_tokens), repeats),
        sealed_us=median_us(one_request(Seals(secret), prompt_tokens), repeats),
    )


def main() -> None:
    """Measures all cases and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cases = [measure(tokens, arguments.repeats) for tokens in PROMPTS]
    lines = ["| prompt tokens | open, us | with a secret, us | cost, us |", "| --- | --- | --- | --- |"]
    lines += [f"| {case.prompt_tokens} | {case.open_us} | {case.sealed_us} | {case.cost_us:.1f} |" for case in cases]
    print("\n".join(lines))
    if arguments.out is not None:
        about = environment.describe()
        raw = {"environment": about, "repeats": arguments.repeats, "cases": [asdict(case) for case in cases]}
        page = environment.heading(about, "Microseconds per handed-over request, all processes together,")
        write_results(arguments.out, f"seals-{about['date']}", raw, page + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

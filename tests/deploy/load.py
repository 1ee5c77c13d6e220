"""Clients that stream long answers one after the other, and remember how each of them ended."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pdserve.base.api_key import bearer
from tests.support.cluster import MODEL

_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Answer:
    """One streamed answer."""

    started_at: float
    num_tokens: int = 0
    #: None while it runs, and when it broke.
    finish_reason: str | None = None
    error: str = ""
    first_token_at: float | None = None
    ended_at: float | None = None

    @property
    def duration_s(self) -> float:
        """Time from the request to the last byte."""
        return (self.ended_at or time.monotonic()) - self.started_at


@dataclass
class Load:
    """Clients in threads. `answers` has those that ended and those that run."""

    port: int
    max_tokens: int
    api_key: str | None = None
    answers: list[Answer] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def stream(self, number: int) -> Answer:
        """Streams one answer to a prompt that no worker has cached."""
        answer = Answer(time.monotonic())
        with self._changed:
            self.answers.append(answer)
        try:
            self._stream(answer, number)
        except (OSError, ValueError, http.client.HTTPException) as error:
            answer.error = repr(error)
        with self._changed:
            answer.ended_at = time.monotonic()
            self._changed.notify_all()
        return answer

    def _stream(self, answer: Answer, number: int) -> None:
        body = {
            "model": MODEL,
            "prompt": f"Story {number} of {time.monotonic_ns()}. " + "Once upon a time there was a town. " * 30,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": 1,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Content-Type": "application/json", **bearer(self.api_key)}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                answer.error = f"{response.status}: {response.read().decode(errors='replace')[:300]}"
                return
            for line in response:
                if line.startswith(b"data: {"):
                    self._take(answer, json.loads(line[6:]))
        finally:
            connection.close()

    def _take(self, answer: Answer, event: dict[str, object]) -> None:
        if "error" in event:
            answer.error = str(event["error"])
        choices = event.get("choices")
        with self._changed:
            if isinstance(choices, list) and choices:
                answer.first_token_at = answer.first_token_at or time.monotonic()
                answer.num_tokens += 1
                answer.finish_reason = choices[0].get("finish_reason") or answer.finish_reason
            usage = event.get("usage")
            if isinstance(usage, dict):
                answer.num_tokens = usage["completion_tokens"]
            self._changed.notify_all()

    def run(self, number: int) -> None:
        """Streams answers until the load ends."""
        while not self._stop.is_set():
            self.stream(number)

    def stop(self) -> None:
        """Lets the running answers be the last ones."""
        self._stop.set()

    def running(self) -> list[Answer]:
        """The answers that have tokens and have not ended."""
        return [answer for answer in list(self.answers) if answer.ended_at is None and answer.num_tokens]

    def wait_running(self, number: int) -> list[Answer]:
        """Returns this many answers that are being streamed."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.running()) >= number, timeout=_TIMEOUT_S)
        return self.running()

    def wait_next(self, number: int) -> None:
        """Returns once this many answers that start from now on have ended."""
        since = time.monotonic()

        def ended() -> int:
            return sum(answer.ended_at is not None and answer.started_at >= since for answer in self.answers)

        with self._changed:
            assert self._changed.wait_for(lambda: ended() >= number, timeout=3 * _TIMEOUT_S)

    def failures(self) -> list[str]:
        """What went wrong, one line for each answer that is not whole."""
        found = []
        for answer in self.answers:
            whole = answer.finish_reason == "length" and answer.num_tokens == self.max_tokens
            if answer.ended_at is not None and (answer.error or not whole):
                found.append(f"{answer.num_tokens} tokens, {answer.finish_reason}, {answer.error or 'no error'}")
        return found


def tokens_for(seconds: float, probe: Load, *, clients: int) -> int:
    """How many tokens an answer needs to last this long beside `clients` - 1 others, by a short load."""
    with running(probe, clients=clients):
        probe.wait_running(clients)
        probe.stop()
    assert probe.failures() == []
    writing = [(answer.ended_at or 0.0) - (answer.first_token_at or 0.0) for answer in probe.answers]
    return max(64, min(3000, int(seconds / max(writing) * probe.max_tokens)))


@contextmanager
def running(load: Load, *, clients: int) -> Iterator[Load]:
    """Keeps this many clients busy until the block ends, then waits for their last answers."""
    threads = [threading.Thread(target=load.run, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop()
        for thread in threads:
            thread.join()

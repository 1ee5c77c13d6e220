"""Encoding in a child process that can be ended: for tokenizers whose time and memory are not known to be bounded.

`python -m pdserve.model.isolated_encoder` is the child. The parent sends frames: the tokenizer's JSON, then texts. Each
is answered by a frame. The child's limits are its own: a timer of processor time, whose signal ends it even within a
regular expression, and a limit of its address space.
"""

from __future__ import annotations

import resource
import signal
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

import tokenizers

from pdserve.base.config import child_environment
from pdserve.base.errors import RequestError, SetupError
from pdserve.model.library_errors import library_errors, unsplit

#: Processor time for any text, and, beyond that, the slowest encoding: far below the speed of real tokenizers.
LEAST_S = 2.0
_BYTES_PER_S = 100_000
#: Processor time for reading the tokenizer.
_READ_S = 60.0
MAX_MEMORY_BYTES = 4 << 30
_HEADER = struct.Struct("<BI")
_TEXT, _TEXT_WITH_SPECIAL = 0, 1
_IDS, _REFUSED = 0, 1


class EncoderProcess:
    """The child, which is started again after a text that has ended it. For all threads."""

    def __init__(
        self, tokenizer_json: str, where: str, *, least_s: float = LEAST_S, max_memory_bytes: int = MAX_MEMORY_BYTES
    ) -> None:
        """`where`: the file. `least_s`: processor time for a short text. `max_memory_bytes`: of its address space."""
        self._tokenizer_json, self._where = tokenizer_json, where
        self._least_s, self._max_memory_bytes = least_s, max_memory_bytes
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the child. Raises `SetupError` when it cannot read the tokenizer."""
        with self._lock:
            try:
                self._start()
            except (OSError, EOFError):
                self._end()
                raise SetupError(
                    f"{self._where} cannot be read with {_READ_S:.0f} s of processor time and {self._max_memory_bytes} "
                    "bytes of memory. Use another tokenizer."
                ) from None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """As `Tokenizer.encode`. Raises `RequestError` also for a text that takes too much time or memory."""
        data = text.encode(errors="surrogatepass")
        with self._lock:
            try:
                child = self._child or self._start()
                kind, answer = _ask(child, _TEXT_WITH_SPECIAL if add_special_tokens else _TEXT, data)
            except (OSError, EOFError):
                self._end()
                raise RequestError(
                    f"The model's tokenizer needs too much for this text of {len(text)} characters (limits "
                    f"{_limit_s(self._least_s, data):.1f} s of processor time and {self._max_memory_bytes} bytes). "
                    "Use another text or tokenizer."
                ) from None
        if kind == _REFUSED:
            raise RequestError(answer.decode(errors="replace"))
        return array("I", answer).tolist()

    def close(self) -> None:
        """Ends the child, whatever it does. A later text starts another one."""
        if (child := self._child) is not None:
            child.kill()
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        # In a session of its own: what is typed at a terminal ends the parent in its own time, and that the child.
        child = self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._least_s), str(self._max_memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            start_new_session=True,
        )
        kind, answer = _ask(child, _TEXT, self._tokenizer_json.encode(errors="surrogatepass"))
        if kind == _REFUSED:
            self._end()
            raise SetupError(f"{self._where} is not a valid tokenizer: {answer.decode(errors='replace')}.")
        return child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                with suppress(OSError):  # What it did not read.
                    pipe.close()


def _ask(child: subprocess.Popen[bytes], kind: int, data: bytes) -> tuple[int, bytes]:
    """Sends a frame. Returns the answer. Raises OSError or EOFError when the child has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    _write(child.stdin, kind, data)
    return _read(child.stdout)


def _write(pipe: IO[bytes], kind: int, data: bytes) -> None:
    pipe.write(_HEADER.pack(kind, len(data)))
    pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> tuple[int, bytes]:
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError
    kind, size = _HEADER.unpack(header)
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return kind, data


def _limit_s(least_s: float, data: bytes) -> float:
    return least_s + len(data) / _BYTES_PER_S


# The child.
@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """The block may use so much processor time, of all threads: then SIGPROF ends the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _encoded(tokenizer: tokenizers.Tokenizer, kind: int, data: bytes) -> tuple[int, bytes]:
    try:
        with library_errors(unsplit):
            text = data.decode(errors="surrogatepass")
            [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=kind == _TEXT_WITH_SPECIAL)
            return _IDS, array("I", encoding.ids).tobytes()
    except RequestError as error:
        return _REFUSED, str(error).encode(errors="replace")


def main(least_s: float, max_memory_bytes: int) -> None:
    """Answers until the parent is gone."""
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    _, document = _read(source)
    try:
        with _limited(_READ_S), library_errors(SetupError):
            tokenizer = tokenizers.Tokenizer.from_str(document.decode(errors="surrogatepass"))
            tokenizer.no_truncation()
            tokenizer.no_padding()
    except SetupError as error:
        _write(sink, _REFUSED, str(error).encode(errors="replace"))
        return
    _write(sink, _IDS, b"")
    while True:
        try:
            kind, data = _read(source)
        except EOFError:
            return
        with _limited(_limit_s(least_s, data)):
            answer = _encoded(tokenizer, kind, data)
        _write(sink, *answer)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))

"""The bar of a class with tqdm's interface, and none."""

from __future__ import annotations

from typing import Any

from pdserve import CompletionOutput, RequestOutput
from pdserve.llm.progress import Speed, progress_bar

OUTPUT = RequestOutput(
    request_id="r",
    prompt="p",
    prompt_token_ids=[1] * 10,
    outputs=[CompletionOutput(index=index, text="", token_ids=[1, 2]) for index in range(2)],
    finished=True,
)


class _Bar:
    def __init__(self, **options: Any) -> None:
        self.options, self.count, self.closed, self.postfix = options, 0, False, ""

    def update(self, count: int) -> None:
        self.count += count

    def close(self) -> None:
        self.closed = True


def test_speeds_are_tokens_per_second() -> None:
    times = iter([0.0, 2.0, 4.0])
    speed = Speed(lambda: next(times))
    assert speed.add(OUTPUT) == "input: 5.0 toks/s, output: 2.0 toks/s"
    assert speed.add(OUTPUT) == "input: 5.0 toks/s, output: 2.0 toks/s"


def test_a_given_bar_is_made_advanced_and_closed() -> None:
    bars: list[_Bar] = []

    def make(**options: Any) -> _Bar:
        bars.append(_Bar(**options))
        return bars[0]

    with progress_bar(3, make) as advance:
        advance(OUTPUT)
        advance(OUTPUT)
    assert bars[0].options == {"total": 3, "desc": "Processed prompts", "dynamic_ncols": True}
    assert (bars[0].count, bars[0].closed) == (2, True)
    assert "output:" in bars[0].postfix


def test_without_a_bar_nothing_is_written(capsys: Any) -> None:
    with progress_bar(1, False) as advance:
        advance(OUTPUT)
    assert capsys.readouterr() == ("", "")


def test_the_own_bar_has_counts_and_speeds_on_stderr(capsys: Any) -> None:
    with progress_bar(1, True) as advance:
        advance(OUTPUT)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Processed prompts" in captured.err
    assert "1/1" in captured.err

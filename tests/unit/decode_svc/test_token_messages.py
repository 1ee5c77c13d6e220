"""Messages with tokens have a bounded size, however many steps wait for a slow router."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from decode_svc.token_messages import MAX_MESSAGE_ENTRIES, token_messages
from pdserve.base.ids import RequestId
from pdserve.base.sampling import ChoiceTokens, TokenLogprobs
from pdserve.engine.step import RequestTokens

ENTRY = TokenLogprobs(logprob=-1.0, rank=1, top_ids=tuple(range(20)), top_logprobs=(-1.0,) * 20)


def step(index: int, *, choices: int, entry: TokenLogprobs | None = None) -> RequestTokens:
    tokens = tuple(
        ChoiceTokens(choice_index=choice, first_index=index, token_ids=(7,), logprobs=() if entry is None else (entry,))
        for choice in range(choices)
    )
    return RequestTokens(request_id=RequestId("r"), attempt=1, choices=tokens)


def drain(waiting: deque[RequestTokens]) -> Iterator[RequestTokens]:
    while waiting:
        yield waiting.popleft()


def test_a_backlog_of_steps_is_sent_in_messages_of_bounded_size() -> None:
    waiting = deque(step(index, choices=4, entry=ENTRY) for index in range(1000))
    sent: list[tuple[int, int]] = []
    while waiting:
        for message in token_messages(waiting.popleft(), drain(waiting)):
            entries = sum(1 + 1 + len(choice.logprobs[0].top_ids) for choice in message.choices)
            assert entries <= MAX_MESSAGE_ENTRIES
            sent.extend((choice.first_index, choice.choice_index) for choice in message.choices)
    assert sent == [(index, choice) for index in range(1000) for choice in range(4)]


def test_a_wide_step_is_split_and_a_narrow_one_is_one_message() -> None:
    assert len(list(token_messages(step(0, choices=128, entry=ENTRY), iter(())))) == 6
    assert len(list(token_messages(step(0, choices=128), iter(())))) == 1

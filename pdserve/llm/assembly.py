"""From the answers of the HTTP API, whole or piece by piece, to `RequestOutput`s. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.llm.outputs import CompletionOutput, Logprob, RequestOutput

_ABORT = "abort"


@dataclass(slots=True)
class _Choice:
    """What has arrived of an output, and how much of it was in the last delta."""

    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    #: Characters of text and reasoning, and tokens, that a delta has already had.
    sent: tuple[int, int, int] = (0, 0, 0)


class Assembly:
    """Collects one request's answer."""

    def __init__(
        self, *, request_id: str, prompt: str | None, n: int, num_logprobs: int | None, seed: int | None
    ) -> None:
        """`num_logprobs`: alternatives that are reported; None: no log-probabilities."""
        self._request_id = request_id
        self._prompt = prompt
        self._num_logprobs = num_logprobs
        self._seed = seed
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._cached_tokens: int | None = None
        self._choices = [_Choice() for _ in range(n)]

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended."""
        return all(choice.finish_reason is not None for choice in self._choices)

    def add(self, answer: Mapping[str, Any]) -> bool:
        """Takes in a whole answer or one event of a stream. Returns whether it has anything new of an output."""
        usage = answer.get("usage")
        if usage:
            self._cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        self._note_prompt(answer)
        news = [self._add_choice(choice) for choice in answer["choices"]]
        return any(news)

    def abort(self) -> None:
        """Ends the outputs that have not ended."""
        for choice in self._choices:
            choice.finish_reason = choice.finish_reason or _ABORT

    def output(self) -> RequestOutput:
        """All that has arrived."""
        return self._request_output([self._completion(index, (0, 0, 0)) for index in range(len(self._choices))])

    def delta(self) -> RequestOutput:
        """What has arrived since the last delta, of the outputs that have anything new or have ended just now."""
        changed = []
        for index, choice in enumerate(self._choices):
            now = (len(choice.text), len(choice.reasoning), len(choice.token_ids) + (choice.finish_reason is not None))
            if now != choice.sent:
                changed.append(self._completion(index, choice.sent))
                choice.sent = now
        return self._request_output(changed)

    def _note_prompt(self, owner: Mapping[str, Any]) -> None:
        if owner.get("prompt_token_ids"):
            self._prompt_token_ids = owner["prompt_token_ids"]
        if owner.get("prompt_logprobs") is not None:
            self._prompt_logprobs = [_prompt_token(entry) for entry in owner["prompt_logprobs"]]

    def _add_choice(self, answer: Mapping[str, Any]) -> bool:
        self._note_prompt(answer)
        choice = self._choices[answer["index"]]
        # A chat has a delta or a whole message, a completion its text.
        message = answer.get("delta") or answer.get("message") or {"content": answer.get("text")}
        token_ids = answer.get("token_ids") or []
        choice.text += message.get("content") or ""
        choice.reasoning += message.get("reasoning") or ""
        for position, call in enumerate(message.get("tool_calls") or ()):
            _add_call(choice.tool_calls, call.get("index", position), call)
        choice.token_ids += token_ids
        entries = answer.get("logprob_entries") or (answer.get("logprobs") or {}).get("content") or ()
        choice.logprobs += [self._logprobs(entry) for entry in entries]
        choice.finish_reason = answer.get("finish_reason") or choice.finish_reason
        reason = answer.get("stop_reason")
        choice.stop_reason = choice.stop_reason if reason is None else reason
        return bool(token_ids or choice.finish_reason or message.get("content"))

    def _logprobs(self, entry: Mapping[str, Any]) -> dict[int, Logprob]:
        """The sampled token, then the likeliest ones, then those that the request has listed."""
        alternatives: Sequence[Mapping[str, Any]] = entry["top_logprobs"]
        shown = {entry["token_id"]: Logprob(entry["logprob"], entry["rank"], entry["token"])}
        for index, each in enumerate(alternatives):
            rank = index + 1 if index < (self._num_logprobs or 0) else None
            shown.setdefault(each["token_id"], Logprob(each["logprob"], rank, each["token"]))
        return shown

    def _completion(self, index: int, sent: tuple[int, int, int]) -> CompletionOutput:
        choice = self._choices[index]
        text_start, reasoning_start, tokens_start = sent
        token_ids = choice.token_ids[tokens_start:]
        logprobs = None if self._num_logprobs is None else choice.logprobs[tokens_start:]
        return CompletionOutput(
            index=index,
            text=choice.text[text_start:],
            token_ids=token_ids,
            cumulative_logprob=None if logprobs is None else _cumulative(choice.token_ids, choice.logprobs),
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            reasoning=choice.reasoning[reasoning_start:] or None,
            tool_calls=[{**call, "function": {**call["function"]}} for call in choice.tool_calls],
        )

    def _request_output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._cached_tokens,
            seed=self._seed,
        )


def _prompt_token(entry: Mapping[str, Mapping[str, Any]] | None) -> dict[int, Logprob] | None:
    if entry is None:
        return None
    return {int(token_id): Logprob(**fields) for token_id, fields in entry.items()}


def _cumulative(token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]]) -> float:
    return sum(entry[token_id].logprob for token_id, entry in zip(token_ids, logprobs, strict=True))


def _add_call(calls: list[dict[str, Any]], index: int, new: Mapping[str, Any]) -> None:
    """Takes in a whole call, or more of one: the first piece has the id and the name."""
    if index == len(calls):
        function = {"name": new["function"]["name"], "arguments": ""}
        calls.append({"id": new["id"], "type": "function", "function": function})
    calls[index]["function"]["arguments"] += new["function"].get("arguments") or ""

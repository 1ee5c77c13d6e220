"""The answers of decisions as types, and how they follow from log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# Python 3.11 has one that pydantic cannot read.
from typing_extensions import TypedDict

from router_svc.api.decisions.labels import Label
from router_svc.api.decisions.schema import Choice, Predicate, Question

#: OpenAI and vLLM write this for minus infinity, which JSON does not have.
_LOWEST = -9999.0


class OptionProbability(TypedDict):
    """How likely an answer is among the possible ones, and the logarithm of its probability among all tokens."""

    value: str | bool
    probability: float
    logprob: float


class LevelProbability(TypedDict):
    """The same of a level, with its number."""

    value: int
    label: str
    probability: float
    logprob: float


class PredicateAnswer(TypedDict):
    """How likely it is that the predicate is true."""

    type: Literal["predicate"]
    name: str | None
    probability: float
    probabilities: list[OptionProbability]
    label_mass: float


class ChoiceAnswer(TypedDict):
    """The likeliest choice; the first one of several."""

    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[OptionProbability]
    label_mass: float


class ScoreAnswer(TypedDict):
    """The mean of the levels' numbers by their probabilities."""

    type: Literal["score"]
    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]
    label_mass: float


DecisionAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class DecisionInputDetails(TypedDict):
    """Prompt tokens that were in the prefix cache. Writing to it is not counted."""

    cached_tokens: int
    cache_write_tokens: int


class DecisionOutputDetails(TypedDict):
    """No decision has thinking."""

    reasoning_tokens: int


class DecisionUsage(TypedDict):
    """Tokens of a request, over all questions: each has a prompt, and one token of output."""

    input_tokens: int
    input_tokens_details: DecisionInputDetails
    output_tokens: int
    output_tokens_details: DecisionOutputDetails
    total_tokens: int


class DecisionList(TypedDict):
    """The answer of `POST /v1/decisions`, in the order of the questions."""

    id: str
    object: Literal["decision"]
    created: int
    model: str
    answers: list[DecisionAnswer]
    usage: DecisionUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """The probabilities of the options of a question: among each other, and as logarithms among all tokens."""

    shares: Sequence[float]
    logprobs: Sequence[float]
    #: The sum of the latter as probabilities.
    mass: float

    @property
    def best(self) -> int:
        """The likeliest option; the first one of several."""
        return max(range(len(self.shares)), key=self.shares.__getitem__)

    @property
    def confidence(self) -> float:
        """The probability of the likeliest option among all tokens."""
        return self.shares[self.best] * self.mass


def answer_of(question: Question, labels: Sequence[Label], logprobs: Mapping[int, float]) -> DecisionAnswer:
    """The answer that follows from the log-probabilities of the labels' tokens."""
    found = _shares([_log_sum([logprobs[token_id] for token_id in label.token_ids]) for label in labels])
    if isinstance(question, Predicate):
        return {
            "type": "predicate",
            "name": question.name,
            "probability": found.shares[0],
            "probabilities": _options((True, False), found),
            "label_mass": found.mass,
        }
    if isinstance(question, Choice):
        return {
            "type": "choice",
            "name": question.name,
            "choice": question.choices[found.best].value,
            "confidence": found.confidence,
            "probabilities": _options([each.value for each in question.choices], found),
            "label_mass": found.mass,
        }
    numbered = enumerate(zip(question.levels, found.shares, found.logprobs, strict=True))
    return {
        "type": "score",
        "name": question.name,
        "score": math.fsum(number * share for number, share in enumerate(found.shares)),
        "confidence": found.confidence,
        "probabilities": [
            {"value": number, "label": level.label, "probability": share, "logprob": logprob}
            for number, (level, share, logprob) in numbered
        ],
        "label_mass": found.mass,
    }


def _shares(logprobs: Sequence[float]) -> _Shares:
    total = _log_sum(logprobs)
    # Without any probability, no option is more likely than another one.
    shares = [math.exp(each - total) if total > -math.inf else 1 / len(logprobs) for each in logprobs]
    shown = [max(each, _LOWEST) for each in logprobs]
    return _Shares(shares=shares, logprobs=shown, mass=min(1.0, math.exp(total)))


def _options(values: Sequence[str | bool], found: _Shares) -> list[OptionProbability]:
    return [
        {"value": value, "probability": share, "logprob": logprob}
        for value, share, logprob in zip(values, found.shares, found.logprobs, strict=True)
    ]


def _log_sum(logprobs: Sequence[float]) -> float:
    """The logarithm of the sum of probabilities."""
    highest = max(logprobs)
    if highest == -math.inf:
        return highest
    return highest + math.log(math.fsum(math.exp(each - highest) for each in logprobs))

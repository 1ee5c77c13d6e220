"""The tokens with which a model's answer can begin, of which each stands for one of the options of a question."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from string import ascii_letters, ascii_uppercase, digits

from pdserve.base.errors import RequestError
from pdserve.model.tokenizer import Tokenizer
from router_svc.api.decisions.schema import MAX_CHOICES, Choice, Predicate, Question
from router_svc.api.last_used import LastUsed
from router_svc.api.served_model import ServedModel
from router_svc.api.text_threads import INLINE_CHARACTERS

#: Characters of a prompt's end that decide how the text behind it is tokenized.
_TAIL = 256
#: The spellings of the answers to a predicate.
_YES, _NO = ("yes", "Yes"), ("no", "No")


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """How an option is called in the prompt, and the tokens of which each is an answer with it."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What a model can answer with in one token. Empty: it cannot answer such questions."""

    #: Yes and no.
    truth: tuple[Label, ...]
    #: Letters, and behind those of the alphabet pairs of letters.
    letters: tuple[Label, ...]
    digits: tuple[Label, ...]

    def of(self, question: Question, index: int) -> tuple[Label, ...]:
        """One label per option. `index`: that of the question. Raises `RequestError` if there are too few."""
        if isinstance(question, Predicate):
            found, number, name = self.truth, 2, "type"
        elif isinstance(question, Choice):
            found, number, name = self.letters, len(question.choices), "choices"
        else:
            found, number, name = self.digits, len(question.levels), "levels"
        if len(found) < number:
            raise RequestError(
                f"`questions[{index}]` has {number} possible answers, but the tokenizer and the chat template of this "
                f"model leave {len(found)} answers of one token that differ. Send fewer, or use another model.",
                param=f"questions[{index}].{name}",
            )
        return found[:number]


class ModelLabels:
    """The labels of a model, which depend on the variables of its template, too."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._found: LastUsed[Labels] = LastUsed(16)

    async def find(self, template_kwargs: Mapping[str, object]) -> Labels:
        """The labels for answers to prompts with these variables. Raises `RequestError`."""
        key = hashlib.sha256(repr(sorted(template_kwargs.items())).encode(errors="surrogatepass")).digest()
        # Never on the event loop: a template can take long.
        return await self._model.threads.run(
            INLINE_CHARACTERS + 1,
            lambda: self._found.get(key, lambda: _find_labels(self._model, template_kwargs)),
        )


def _find_labels(model: ServedModel, template_kwargs: Mapping[str, object]) -> Labels:
    question = [{"role": "user", "content": "?"}]
    start = str(model.template.render(question, add_generation_prompt=True, **template_kwargs))
    answers = _Answers(model.tokenizer, start[-_TAIL:])
    truth = [tuple(dict.fromkeys(answers.first_tokens(spellings))) for spellings in (_YES, _NO)]
    is_clear = all(truth) and not {*truth[0]} & {*truth[1]}
    return Labels(
        truth=tuple(Label(text=text, token_ids=each) for text, each in zip(("yes", "no"), truth, strict=True))
        if is_clear
        else (),
        letters=tuple(answers.labels(_letters(), MAX_CHOICES)),
        digits=tuple(answers.labels(iter(digits), len(digits))),
    )


def _letters() -> Iterator[str]:
    yield from ascii_uppercase
    yield from ascii_letters[: len(ascii_uppercase)]
    yield from map("".join, product(ascii_uppercase, repeat=2))


class _Answers:
    """Answers as the tokenizer writes them behind a prompt."""

    def __init__(self, tokenizer: Tokenizer, start: str) -> None:
        self._tokenizer = tokenizer
        self._start = start
        self._start_ids = tokenizer.encode(start, False)

    def first_tokens(self, texts: tuple[str, ...]) -> list[int]:
        """The first tokens of texts, without texts that change the tokens of the prompt."""
        return [tokens[0] for text in texts if (tokens := self._tokens(text))]

    def labels(self, texts: Iterator[str], limit: int) -> Iterator[Label]:
        """The texts that are one token each, up to a limit. None has the token of an earlier one."""
        taken = set[int]()
        for text in texts:
            tokens = self._tokens(text)
            if len(tokens) == 1 and tokens[0] not in taken:
                taken.add(tokens[0])
                yield Label(text=text, token_ids=(tokens[0],))
            if len(taken) == limit:
                return

    def _tokens(self, text: str) -> list[int]:
        token_ids, before = self._tokenizer.encode(self._start + text, False), len(self._start_ids)
        return token_ids[before:] if token_ids[:before] == self._start_ids else []

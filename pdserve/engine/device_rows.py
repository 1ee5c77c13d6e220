"""The rows of a step as arrays, ready to be copied to a device. A row that cannot be prepared fails alone."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.base.logs import get_logger
from pdserve.base.sampling import SamplingParams
from pdserve.engine.sequence import SampleFailure, SampleRow, unprepared
from pdserve.model.grammar import TokenBits

Array = npt.NDArray[np.generic]

log = get_logger(__name__)

#: Tokens that can be added to a history on the device before it moves to larger memory.
SPARE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRows:
    """Fields of `kernels.triton.sample_rows.SampleRows`, and how to launch them."""

    #: Fields that never change for a row; None: those of the previous call.
    constant: dict[str, Array] | None
    #: The other fields, except for the history.
    changing: dict[str, Array]
    #: Fields of `TokenHistory`; None: the history on the device goes on.
    history: dict[str, Array] | None
    #: Whether any row's logits are changed before sampling.
    has_edits: bool
    max_logprobs: int | None
    #: Rows that could not be prepared, by index. A stand-in takes their place.
    failures: dict[int, SampleFailure]


class RowPreparer:
    """Prepares the rows of one step after the other. Keeps what it has prepared for the last step's rows."""

    def __init__(self) -> None:
        self._rows: list[SampleRow] = []  # Held, so that no other row gets the id() of one of them.
        #: As `_rows`, with a stand-in for each of `_failures`.
        self._sound: list[SampleRow] = []
        self._failures: dict[int, SampleFailure] = {}
        #: Histories of rows with penalties, by the row's id().
        self._histories: dict[int, _History] = {}

    @property
    def has_histories(self) -> bool:
        """Whether a row of the last step has penalties."""
        return bool(self._histories)

    def prepare(self, rows: Items[SampleRow], logits_rows: Items[int], *, is_ahead: bool) -> PreparedRows:
        """The rows as arrays. `is_ahead`: as in `DeviceSampler.launch`.

        Any error that no row causes when it is prepared alone is raised.
        """
        is_new = not self._is_unchanged(rows)
        assert not (is_ahead and is_new), "cannot sample ahead: the rows are not those of the previous call"
        if is_new:
            self._rows, self._sound, self._failures = list(rows), list(rows), {}
        try:
            return self._prepare(logits_rows, is_new=is_new, is_ahead=is_ahead)
        except MemoryError:
            raise
        except Exception as error:
            if not self._replace_broken():
                raise
            log.error("rows_not_prepared", rows=len(self._failures), exc=error)
            return self._prepare(logits_rows, is_new=True, is_ahead=is_ahead)

    def _prepare(self, logits_rows: Items[int], *, is_new: bool, is_ahead: bool) -> PreparedRows:
        rows = self._sound
        constant = constant_fields(rows) if is_new else None
        if is_new:
            penalized = {id(row) for row in rows if row.penalizes}
            self._histories = {key: self._histories.get(key) or _History() for key in penalized}
        positions = [row.position + is_ahead for row in rows]
        banned = [row.banned_at(position) for row, position in zip(rows, positions, strict=True)]
        allowed = [row.allowed() for row in rows]  # Copied below, once.
        num_logprobs = [row.params.logprobs for row in rows if row.params.logprobs is not None]
        return PreparedRows(
            constant=constant,
            changing=_changing(rows, logits_rows, positions, banned, allowed),
            history=None if is_ahead else _padded([self._histories[id(row)].of(row) for row in rows if row.penalizes]),
            has_edits=any(map(_is_edited, rows, banned, allowed)),
            max_logprobs=max(num_logprobs) if num_logprobs else None,
            failures=self._failures,
        )

    def _replace_broken(self) -> bool:
        """Put stand-ins for the rows that cannot be prepared alone; False without any."""
        found = False
        for index, row in enumerate(self._sound):
            try:
                constant_fields([row])
                _changing([row], [0], [row.position], [row.banned], [row.allowed()])
                _padded([_History().of(row)])
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this row's
                found = True
                self._failures[index] = unprepared(error)
                self._sound[index] = stand_in(row)
        return found

    def _is_unchanged(self, rows: Items[SampleRow]) -> bool:
        """Whether these are the rows of the last step, which only have more tokens now."""
        return len(rows) == len(self._rows) and all(row is last for row, last in zip(rows, self._rows, strict=True))


def stand_in(row: SampleRow) -> SampleRow:
    """A row that can always be prepared, and has a slot in the history if `row` has one."""
    params = SamplingParams(temperature=0.0, presence_penalty=float(row.penalizes))
    return SampleRow(params=params, choice_index=0, tokens=array("q", [0]), num_prompt=1)


def _is_edited(row: SampleRow, banned: tuple[int, ...], allowed: TokenBits | None) -> bool:
    return bool(row.params.logit_bias or banned) or row.penalizes or allowed is not None


class _History:
    """The distinct tokens of one row, and how often each is in the output; updated token by token."""

    def __init__(self) -> None:
        self._ids, self._counts = array("i"), array("i")
        self._index_of: dict[int, int] = {}
        self._num_tokens = 0

    def of(self, row: SampleRow) -> tuple[Array, Array]:
        """Ids and counts, valid until the row has another token."""
        for index in range(self._num_tokens, len(row.tokens)):
            token = row.tokens[index]
            entry = self._index_of.setdefault(token, len(self._ids))
            if entry == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[entry] += index >= row.num_prompt
        self._num_tokens = len(row.tokens)
        return np.array(self._ids, np.int32), np.array(self._counts, np.int32)


def constant_fields(rows: Items[SampleRow]) -> dict[str, Array]:
    """The fields of `SampleRows` that never change for a row."""
    params = [row.params for row in rows]
    logprobs = [-1 if each.logprobs is None else each.logprobs for each in params]
    biases = [each.logit_bias for each in params]
    return {
        "seed": np.array([each.seed & (2**64 - 1) for each in params], np.uint64).view(np.int64),
        "choice_index": np.array([row.choice_index for row in rows], np.int64),
        "temperature": np.array([each.temperature for each in params], np.float64),
        "top_p": np.array([each.top_p for each in params], np.float64),
        "min_p": np.array([each.min_p for each in params], np.float64),
        "presence_penalty": np.array([each.presence_penalty for each in params], np.float64),
        "frequency_penalty": np.array([each.frequency_penalty for each in params], np.float64),
        "top_k": np.array([each.top_k for each in params], np.int32),
        "repetition_penalty": np.array([each.repetition_penalty for each in params], np.float32),
        "num_logprobs": np.array(logprobs, np.int32),
        "listed_ids": _padded_ids([each.logprob_token_ids for each in params]),
        "bias_starts": _starts([len(bias) for bias in biases]),
        "bias_ids": np.array([token for bias in biases for token in bias], np.int64),
        "bias_values": np.array([value for bias in biases for value in bias.values()], np.float32),
    }


def _padded_ids(lists: Items[tuple[int, ...]]) -> Array:
    """The lists as rows, with -1 behind the last id."""
    padded = np.full((len(lists), max(map(len, lists), default=0)), -1, np.int64)
    for row, ids in zip(padded, lists, strict=True):
        row[: len(ids)] = ids
    return padded


def _changing(
    rows: Items[SampleRow],
    logits_rows: Items[int],
    positions: list[int],
    banned: Items[tuple[int, ...]],
    allowed: Items[TokenBits | None],
) -> dict[str, Array]:
    """The other fields of `SampleRows`, except for the history."""
    penalize = np.array([row.penalizes for row in rows], bool)
    has_grammar = np.array([bits is not None for bits in allowed], bool)
    words = [bits.view(np.int32) for bits in allowed if bits is not None]
    return {
        "logits_index": np.array(logits_rows, np.int64),
        "position": np.array(positions, np.int64),
        "banned_starts": _starts([len(ids) for ids in banned]),
        "banned_ids": np.array([token for ids in banned for token in ids], np.int64),
        "history_slot": np.where(penalize, np.cumsum(penalize) - 1, -1),
        "allowed_slot": np.where(has_grammar, np.cumsum(has_grammar) - 1, -1),
        "allowed_words": np.stack(words) if words else np.zeros((0, 0), np.int32),
    }


def _padded(histories: Items[tuple[Array, Array]]) -> dict[str, Array]:
    """The fields of `TokenHistory`, from ids and counts of each row with penalties, with `SPARE_TOKENS` of padding."""
    max_len = max((len(ids) for ids, _ in histories), default=0)
    padded = np.zeros((2, len(histories), max_len + SPARE_TOKENS), np.int32)
    for slot, (ids, counts) in enumerate(histories):
        padded[0, slot, : len(ids)], padded[1, slot, : len(ids)] = ids, counts
    return {"ids": padded[0], "counts": padded[1], "lens": np.array([len(ids) for ids, _ in histories], np.int32)}


def _starts(lengths: list[int]) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int64)

"""Sampling where the logits are: what rows are sampled with goes to the device, and tokens come back, in a copy each.

The kernels choose as `pdserve.engine.sampler` does; only a float32's rounding may differ in log-probabilities.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.triton.penalties import add_to_history
from kernels.triton.sample_rows import RowLogprobs, SampledTokens, SampleRows, TokenHistory
from kernels.triton.sampling import sample
from pdserve.base.sampling import TokenLogprobs
from pdserve.engine.device_batch import current
from pdserve.engine.sampler import failure
from pdserve.engine.sequence import Sampled, SampleResult, SampleRow

Array = npt.NDArray[np.generic]

_ALIGNED = 16
#: Tokens that can be added to a history on the device before it is moved to where there is more room.
_ROOM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSamples:
    """Tokens that are being drawn."""

    rows: list[SampleRow]
    #: On the device; held until they have been copied, so that nothing else gets their memory.
    there: SampledTokens
    #: Pinned, and to be read when `copied` has happened; None: now.
    here: SampledTokens
    copied: torch.cuda.Event | None

    @property
    def token_ids(self) -> Tensor:
        """On the device: int64 [num_rows], -1 for a row that failed. For what is launched in the same stream."""
        return self.there.token_ids

    def results(self) -> list[SampleResult]:
        """One per row. Waits for the device: then the step's K and V are stored, too."""
        if self.copied is not None:
            self.copied.synchronize()
        return _results(self.rows, self.here)


class DeviceSampler:
    """As `Sampler`, for logits on a device. Stateless, but for what it remembers of the last step's rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = current(device)
        # Of their own: what is launched behind a step does not wait until its tokens are copied.
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._rows: list[SampleRow] = []  # Held, so that no other row can take the identity of one of them.
        self._constant: dict[str, Tensor] = {}
        self._histories: dict[int, _History] = {}
        #: Of the last launch, with the tokens that it drew.
        self._last: _DeviceHistory | None = None

    def sample(self, logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int]) -> list[SampleResult]:
        """As `Sampler.sample`. Waits for the device once: when it returns, the step's K and V are stored, too."""
        return self.launch(logits, rows, logits_rows).results()

    def launch(
        self, logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int], *, is_ahead: bool = False
    ) -> DeviceSamples:
        """As `sample`, without waiting. `is_ahead`: each row is drawn a token further than it tells.

        Then they are the rows of the last call, of which each had its token. Nothing here is overwritten while the
        device may still read it: what goes up and down is in memory of its own for each call, and what stays, of the
        same rows, changes only on the device.
        """
        with self._on_device:
            chosen = self._launch(logits, rows, logits_rows, is_ahead=is_ahead)
            here, copied = self._to_host(chosen)
        return DeviceSamples(rows=list(rows), there=chosen, here=here, copied=copied)

    def wait_for_step(self) -> None:
        """Returns when the device has done all that it was told."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _launch(
        self, logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int], *, is_ahead: bool
    ) -> SampledTokens:
        goes_on = self._goes_on(rows)
        if not goes_on:
            self._rows = list(rows)
            self._constant = self._upload(_constant(rows))
            penalized = {id(row) for row in rows if row.penalizes}
            self._histories = {key: self._histories.get(key) or _History() for key in penalized}
        positions = [row.position + is_ahead for row in rows]
        banned = [row.banned_at(position) for row, position in zip(rows, positions, strict=True)]
        has_edits = any(banned) or any(row.params.logit_bias or row.penalizes for row in rows)
        changing = _changing(rows, logits_rows, positions, banned)
        if is_ahead:
            assert goes_on, "ahead of other rows"
            assert self._last is not None
            told = self._upload(changing)
            last = self._last.with_room()
        else:
            histories = [self._histories[id(row)].of(row) for row in rows if row.penalizes]
            told = self._upload(changing | _listed(histories))
            listed = TokenHistory(ids=told.pop("ids"), counts=told.pop("counts"), lens=told.pop("lens"))
            last = _DeviceHistory(listed, _ROOM)
        asked = [row.params.logprobs for row in rows if row.params.logprobs is not None]
        described = SampleRows(**self._constant, **told, history=last.tokens)
        chosen = sample(logits, described, has_edits=has_edits, max_logprobs=max(asked) if asked else None)
        if self._histories:
            add_to_history(described, chosen.token_ids)
        self._last = last
        return chosen

    def _to_host(self, chosen: SampledTokens) -> tuple[SampledTokens, torch.cuda.Event | None]:
        """What is read of it, in host memory, and when it has come there."""
        logprobs = chosen.logprobs
        tensors = [chosen.token_ids]
        if logprobs is not None:
            tensors += [logprobs.logprob, logprobs.rank, logprobs.top_ids, logprobs.top_logprobs]
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=self._copies is not None) for t in tensors]
        copied = None
        if self._copies is None:
            _copy_all(host, tensors)
        else:
            self._copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._copies):
                _copy_all(host, tensors)
                copied = self._copies.record_event()
        told = None
        if logprobs is not None:
            told = RowLogprobs(logprob=host[1], rank=host[2], top_ids=host[3], top_logprobs=host[4])
        here = SampledTokens(token_ids=host[0], threshold=chosen.threshold, num_ties=chosen.num_ties, logprobs=told)
        return here, copied

    def _goes_on(self, rows: Items[SampleRow]) -> bool:
        """Whether these are the rows of the last step, each a token further."""
        return len(rows) == len(self._rows) and all(row is last for row, last in zip(rows, self._rows, strict=True))

    def _upload(self, arrays: dict[str, Array]) -> dict[str, Tensor]:
        """The arrays on the device, in one copy."""
        starts, size = {}, 0
        for name, each in arrays.items():
            starts[name] = size
            size += -(-each.nbytes // _ALIGNED) * _ALIGNED
        # Fresh each time: the copy of the last one may still be under way. Torch keeps pinned memory for reuse.
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        parts = {}
        for name, each in arrays.items():
            piece = slice(starts[name], starts[name] + each.nbytes)
            host[piece].numpy()[:] = each.reshape(-1).view(np.uint8)
            parts[name] = (piece, torch.from_numpy(each[:0]).dtype, each.shape)
        there = host.to(self._device, non_blocking=True)
        return {name: there[piece].view(dtype).view(shape) for name, (piece, dtype, shape) in parts.items()}


class _History:
    """The distinct tokens of one row, and how often each is in the output; taken further token by token."""

    def __init__(self) -> None:
        self._ids, self._counts = array("i"), array("i")
        self._places: dict[int, int] = {}
        self._num_tokens = 0

    def of(self, row: SampleRow) -> tuple[Array, Array]:
        """Ids and counts, valid until the row has another token."""
        for index in range(self._num_tokens, len(row.tokens)):
            token = row.tokens[index]
            place = self._places.setdefault(token, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[place] += index >= row.num_prompt
        self._num_tokens = len(row.tokens)
        return np.array(self._ids, np.int32), np.array(self._counts, np.int32)


@dataclass(slots=True)
class _DeviceHistory:
    """What rows with penalties have had, on the device, where each draw adds a token."""

    tokens: TokenHistory
    #: Draws for which there is room.
    room: int

    def with_room(self) -> _DeviceHistory:
        """For another draw: itself, or a copy with twice the room."""
        if self.room > 1:
            return _DeviceHistory(self.tokens, self.room - 1)
        ids, counts = (
            torch.cat((each, torch.empty_like(each)), dim=1) for each in (self.tokens.ids, self.tokens.counts)
        )
        return _DeviceHistory(TokenHistory(ids=ids, counts=counts, lens=self.tokens.lens), ids.shape[1] // 2)


def _constant(rows: Items[SampleRow]) -> dict[str, Array]:
    """The fields of `SampleRows` that a row keeps."""
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
        "bias_starts": _starts([len(bias) for bias in biases]),
        "bias_ids": np.array([token for bias in biases for token in bias], np.int64),
        "bias_values": np.array([value for bias in biases for value in bias.values()], np.float32),
    }


def _changing(
    rows: Items[SampleRow], logits_rows: Items[int], positions: list[int], banned: Items[tuple[int, ...]]
) -> dict[str, Array]:
    """The other fields, but for the history."""
    penalize = np.array([row.penalizes for row in rows], bool)
    return {
        "logits_index": np.array(logits_rows, np.int64),
        "position": np.array(positions, np.int64),
        "banned_starts": _starts([len(ids) for ids in banned]),
        "banned_ids": np.array([token for ids in banned for token in ids], np.int64),
        "history_slot": np.where(penalize, np.cumsum(penalize) - 1, -1),
    }


def _listed(histories: Items[tuple[Array, Array]]) -> dict[str, Array]:
    """The fields of `TokenHistory`, of ids and counts of each row with penalties; with room for `_ROOM` more."""
    capacity = max((len(ids) for ids, _ in histories), default=0)
    listed = np.zeros((2, len(histories), capacity + _ROOM), np.int32)
    for slot, (ids, counts) in enumerate(histories):
        listed[0, slot, : len(ids)], listed[1, slot, : len(ids)] = ids, counts
    return {"ids": listed[0], "counts": listed[1], "lens": np.array([len(ids) for ids, _ in histories], np.int32)}


def _starts(lengths: list[int]) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int64)


def _copy_all(host: Items[Tensor], tensors: Items[Tensor]) -> None:
    for to, tensor in zip(host, tensors, strict=True):
        to.copy_(tensor, non_blocking=True)


def _results(rows: Items[SampleRow], chosen: SampledTokens) -> list[SampleResult]:
    results: list[SampleResult] = []
    for index, (row, token_id) in enumerate(zip(rows, chosen.token_ids.tolist(), strict=True)):
        if token_id < 0:
            results.append(failure(row))
        else:
            results.append(Sampled(token_id=token_id, logprobs=_logprobs(row, chosen.logprobs, index)))
    return results


def _logprobs(row: SampleRow, told: RowLogprobs | None, index: int) -> TokenLogprobs | None:
    count = row.params.logprobs
    if told is None or count is None:
        return None
    top_ids = tuple(token for token in told.top_ids[index, :count].tolist() if token >= 0)
    return TokenLogprobs(
        logprob=float(told.logprob[index]),
        rank=int(told.rank[index]),
        top_ids=top_ids,
        top_logprobs=tuple(told.top_logprobs[index, : len(top_ids)].tolist()),
    )

"""Sampling on the logits' device: one copy of the parameters to it, and one copy of the tokens back.

The kernels sample the same tokens as `pdserve.engine.sampler`. Log-probabilities may differ by a float32's rounding.
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

_ALIGNED_BYTES = 16
#: Tokens that can be added to a history on the device before it moves to larger memory.
_SPARE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSamples:
    """Tokens that are being sampled."""

    rows: list[SampleRow]
    #: Result on the device; held until it has been copied, so that its memory is not reused.
    on_device: SampledTokens
    #: Result in pinned memory; valid after the event `copied`, or at once if that is None.
    on_host: SampledTokens
    copied: torch.cuda.Event | None

    @property
    def token_ids(self) -> Tensor:
        """Tokens on the device, for launches in the same stream: int64 [num_rows], -1 for a row that failed."""
        return self.on_device.token_ids

    def results(self) -> list[SampleResult]:
        """One result per row. Waits for the device; afterwards the step's K and V are stored, too."""
        if self.copied is not None:
            self.copied.synchronize()
        return _results(self.rows, self.on_host)


class DeviceSampler:
    """As `Sampler`, for logits on a device. Its only state is what it has uploaded for the last step's rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = current(device)
        # A separate stream, so that the next step's launches do not wait for the copy of the tokens.
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._rows: list[SampleRow] = []  # Held, so that no other row gets the id() of one of them.
        self._constant: dict[str, Tensor] = {}
        #: Histories of rows with penalties, by the row's id().
        self._histories: dict[int, _History] = {}
        #: Histories after the last launch, including the tokens that it sampled.
        self._last: _DeviceHistory | None = None

    def sample(self, logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int]) -> list[SampleResult]:
        """As `Sampler.sample`. Waits for the device once; afterwards the step's K and V are stored, too."""
        return self.launch(logits, rows, logits_rows).results()

    def launch(
        self, logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int], *, is_ahead: bool = False
    ) -> DeviceSamples:
        """As `sample`, without waiting. `is_ahead`: sample one token beyond the next one of each row.

        Those must be the rows of the previous call, which sampled their next tokens. No memory is overwritten while the
        device may still read it: uploads and downloads have new memory in each call, and the histories of unchanged
        rows are only modified on the device.
        """
        with self._on_device:
            sampled = self._launch(logits, rows, logits_rows, is_ahead=is_ahead)
            on_host, copied = self._to_host(sampled)
        return DeviceSamples(rows=list(rows), on_device=sampled, on_host=on_host, copied=copied)

    def wait_for_step(self) -> None:
        """Return when the device has done all that was launched in the current stream."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _launch(
        self, logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int], *, is_ahead: bool
    ) -> SampledTokens:
        is_unchanged = self._is_unchanged(rows)
        if not is_unchanged:
            self._rows = list(rows)
            self._constant = self._upload(_constant(rows))
            penalized = {id(row) for row in rows if row.penalizes}
            self._histories = {key: self._histories.get(key) or _History() for key in penalized}
        positions = [row.position + is_ahead for row in rows]
        banned = [row.banned_at(position) for row, position in zip(rows, positions, strict=True)]
        has_edits = any(banned) or any(row.params.logit_bias or row.penalizes for row in rows)
        changing = _changing(rows, logits_rows, positions, banned)
        if is_ahead:
            assert is_unchanged, "cannot sample ahead: the rows are not those of the previous call"
            assert self._last is not None
            uploaded = self._upload(changing)
            last = self._last.with_space()
        else:
            histories = [self._histories[id(row)].of(row) for row in rows if row.penalizes]
            uploaded = self._upload(changing | _padded(histories))
            history = TokenHistory(ids=uploaded.pop("ids"), counts=uploaded.pop("counts"), lens=uploaded.pop("lens"))
            last = _DeviceHistory(history, _SPARE_TOKENS)
        num_logprobs = [row.params.logprobs for row in rows if row.params.logprobs is not None]
        sample_rows = SampleRows(**self._constant, **uploaded, history=last.tokens)
        sampled = sample(
            logits, sample_rows, has_edits=has_edits, max_logprobs=max(num_logprobs) if num_logprobs else None
        )
        if self._histories:
            add_to_history(sample_rows, sampled.token_ids)
        self._last = last
        return sampled

    def _to_host(self, sampled: SampledTokens) -> tuple[SampledTokens, torch.cuda.Event | None]:
        """The tokens and log-probabilities in host memory, and the event after which they are there."""
        logprobs = sampled.logprobs
        tensors = [sampled.token_ids]
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
        if logprobs is not None:
            logprobs = RowLogprobs(logprob=host[1], rank=host[2], top_ids=host[3], top_logprobs=host[4])
        on_host = SampledTokens(
            token_ids=host[0], threshold=sampled.threshold, num_ties=sampled.num_ties, logprobs=logprobs
        )
        return on_host, copied

    def _is_unchanged(self, rows: Items[SampleRow]) -> bool:
        """Whether these are the rows of the last step, which only have more tokens now."""
        return len(rows) == len(self._rows) and all(row is last for row, last in zip(rows, self._rows, strict=True))

    def _upload(self, arrays: dict[str, Array]) -> dict[str, Tensor]:
        """Copy the arrays to the device in one transfer."""
        starts, size = {}, 0
        for name, each in arrays.items():
            starts[name] = size
            size += -(-each.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        # New memory each time, because the previous copy may not have ended. Torch keeps pinned memory for reuse.
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        fields = {}
        for name, each in arrays.items():
            span = slice(starts[name], starts[name] + each.nbytes)
            host[span].numpy()[:] = each.reshape(-1).view(np.uint8)
            fields[name] = (span, torch.from_numpy(each[:0]).dtype, each.shape)
        uploaded = host.to(self._device, non_blocking=True)
        return {name: uploaded[span].view(dtype).view(shape) for name, (span, dtype, shape) in fields.items()}


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


@dataclass(slots=True)
class _DeviceHistory:
    """Tokens of rows with penalties, on the device, where each step adds a token."""

    tokens: TokenHistory
    #: Number of steps for which there is space.
    space: int

    def with_space(self) -> _DeviceHistory:
        """The history for the next step: the same memory, or a copy of twice the size."""
        if self.space > 1:
            return _DeviceHistory(self.tokens, self.space - 1)
        ids, counts = (
            torch.cat((each, torch.empty_like(each)), dim=1) for each in (self.tokens.ids, self.tokens.counts)
        )
        return _DeviceHistory(TokenHistory(ids=ids, counts=counts, lens=self.tokens.lens), ids.shape[1] // 2)


def _constant(rows: Items[SampleRow]) -> dict[str, Array]:
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
        "bias_starts": _starts([len(bias) for bias in biases]),
        "bias_ids": np.array([token for bias in biases for token in bias], np.int64),
        "bias_values": np.array([value for bias in biases for value in bias.values()], np.float32),
    }


def _changing(
    rows: Items[SampleRow], logits_rows: Items[int], positions: list[int], banned: Items[tuple[int, ...]]
) -> dict[str, Array]:
    """The other fields of `SampleRows`, except for the history."""
    penalize = np.array([row.penalizes for row in rows], bool)
    return {
        "logits_index": np.array(logits_rows, np.int64),
        "position": np.array(positions, np.int64),
        "banned_starts": _starts([len(ids) for ids in banned]),
        "banned_ids": np.array([token for ids in banned for token in ids], np.int64),
        "history_slot": np.where(penalize, np.cumsum(penalize) - 1, -1),
    }


def _padded(histories: Items[tuple[Array, Array]]) -> dict[str, Array]:
    """The fields of `TokenHistory`, from ids and counts of each row with penalties, with `_SPARE_TOKENS` of padding."""
    max_len = max((len(ids) for ids, _ in histories), default=0)
    padded = np.zeros((2, len(histories), max_len + _SPARE_TOKENS), np.int32)
    for slot, (ids, counts) in enumerate(histories):
        padded[0, slot, : len(ids)], padded[1, slot, : len(ids)] = ids, counts
    return {"ids": padded[0], "counts": padded[1], "lens": np.array([len(ids) for ids, _ in histories], np.int32)}


def _starts(lengths: list[int]) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int64)


def _copy_all(host: Items[Tensor], tensors: Items[Tensor]) -> None:
    for to, tensor in zip(host, tensors, strict=True):
        to.copy_(tensor, non_blocking=True)


def _results(rows: Items[SampleRow], sampled: SampledTokens) -> list[SampleResult]:
    results: list[SampleResult] = []
    for index, (row, token_id) in enumerate(zip(rows, sampled.token_ids.tolist(), strict=True)):
        if token_id < 0:
            results.append(failure(row))
        else:
            results.append(Sampled(token_id=token_id, logprobs=_logprobs(row, sampled.logprobs, index)))
    return results


def _logprobs(row: SampleRow, sampled: RowLogprobs | None, index: int) -> TokenLogprobs | None:
    count = row.params.logprobs
    if sampled is None or count is None:
        return None
    top_ids = tuple(token for token in sampled.top_ids[index, :count].tolist() if token >= 0)
    return TokenLogprobs(
        logprob=float(sampled.logprob[index]),
        rank=int(sampled.rank[index]),
        top_ids=top_ids,
        top_logprobs=tuple(sampled.top_logprobs[index, : len(top_ids)].tolist()),
    )

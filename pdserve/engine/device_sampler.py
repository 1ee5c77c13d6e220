"""Sampling on the logits' device: one copy of the parameters to it, and one copy of the tokens back.

The kernels sample the same tokens as `pdserve.engine.sampler`. Log-probabilities may differ by a float32's rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.triton.penalties import add_to_history
from kernels.triton.sample_rows import RowLogprobs, SampledTokens, SampleRows, TokenHistory
from kernels.triton.sampling import sample
from pdserve.base.sampling import TokenLogprobs
from pdserve.engine import device_rows
from pdserve.engine.device_batch import current
from pdserve.engine.device_rows import Array, RowPreparer
from pdserve.engine.sampler import failure, with_listed
from pdserve.engine.sequence import Sampled, SampleFailure, SampleResult, SampleRow

_ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSamples:
    """Tokens that are being sampled."""

    rows: list[SampleRow]
    #: Rows that could not be prepared, by index.
    failures: Mapping[int, SampleFailure]
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
        results = _results(self.rows, self.on_host)
        for index, failed in self.failures.items():
            results[index] = failed
        return results


class DeviceSampler:
    """As `Sampler`, for logits on a device. Its only state is what it has uploaded for the last step's rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = current(device)
        # A separate stream, so that the next step's launches do not wait for the copy of the tokens.
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._preparer = RowPreparer()
        self._constant: dict[str, Tensor] = {}
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
            sampled, failures = self._launch(logits, rows, logits_rows, is_ahead=is_ahead)
            on_host, copied = self._to_host(sampled)
        return DeviceSamples(rows=list(rows), failures=failures, on_device=sampled, on_host=on_host, copied=copied)

    def wait_for_step(self) -> None:
        """Return when the device has done all that was launched in the current stream."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _launch(
        self, logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int], *, is_ahead: bool
    ) -> tuple[SampledTokens, Mapping[int, SampleFailure]]:
        prepared = self._preparer.prepare(rows, logits_rows, is_ahead=is_ahead)
        if prepared.constant is not None:
            self._constant = self._upload(prepared.constant)
        if prepared.history is None:
            assert self._last is not None
            uploaded = self._upload(prepared.changing)
            last = self._last.with_space()
        else:
            uploaded = self._upload(prepared.changing | prepared.history)
            history = TokenHistory(ids=uploaded.pop("ids"), counts=uploaded.pop("counts"), lens=uploaded.pop("lens"))
            last = _DeviceHistory(history, device_rows.SPARE_TOKENS)
        sample_rows = SampleRows(**self._constant, **uploaded, history=last.tokens)
        sampled = sample(logits, sample_rows, has_edits=prepared.has_edits, max_logprobs=prepared.max_logprobs)
        if self._preparer.has_histories:
            add_to_history(sample_rows, sampled.token_ids)
        self._last = last
        return sampled, prepared.failures

    def _to_host(self, sampled: SampledTokens) -> tuple[SampledTokens, torch.cuda.Event | None]:
        """The tokens and log-probabilities in host memory, and the event after which they are there."""
        logprobs = sampled.logprobs
        tensors = [sampled.token_ids]
        if logprobs is not None:
            tensors += [logprobs.logprob, logprobs.rank, logprobs.top_ids, logprobs.top_logprobs]
            tensors.append(logprobs.listed_logprobs)
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
            logprobs = RowLogprobs(
                logprob=host[1], rank=host[2], top_ids=host[3], top_logprobs=host[4], listed_logprobs=host[5]
            )
        on_host = SampledTokens(
            token_ids=host[0], threshold=sampled.threshold, num_ties=sampled.num_ties, logprobs=logprobs
        )
        return on_host, copied

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
    found = TokenLogprobs(
        logprob=float(sampled.logprob[index]),
        rank=int(sampled.rank[index]),
        top_ids=top_ids,
        top_logprobs=tuple(sampled.top_logprobs[index, : len(top_ids)].tolist()),
    )
    listed = sampled.listed_logprobs[index, : len(row.params.logprob_token_ids)].tolist()
    return with_listed(found, row.params, listed)

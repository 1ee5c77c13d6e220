"""Sampling by the C++ threads: the results that `pdserve/engine/sampler.py` defines, bit for bit, rows in parallel."""

from __future__ import annotations

from collections.abc import Sequence as Items

from torch import Tensor

from kernels.cpu.sampling import Edits, PackedRequest, RowSampler, SampleRequest, pack
from pdserve.base.logs import get_logger
from pdserve.base.sampling import TokenLogprobs
from pdserve.engine.sampler import Sampler, failure, logprobs_of, with_listed
from pdserve.engine.sequence import Sampled, SampleFailure, SampleResult, SampleRow, unprepared

log = get_logger(__name__)


class CpuSampler:
    """Implements `pdserve.engine.runner.TokenSampler`."""

    def __init__(self, rows: RowSampler) -> None:
        self._rows = rows
        self._argmax = Sampler()

    def sample(self, logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int]) -> list[SampleResult]:
        """As `Sampler.sample`."""
        for row in rows:
            if not row.is_argmax:
                break
        else:  # For these, numpy costs less than requests.
            return self._argmax.sample(logits, rows, logits_rows)
        assert max(logits_rows) < len(logits)
        requests: list[PackedRequest] = []
        sampled: list[tuple[SampleRow, int]] = []
        failures: dict[int, SampleFailure] = {}
        for index, (row, logits_row) in enumerate(zip(rows, logits_rows, strict=True)):
            try:
                requests.append(pack(_request(row, logits_row)))
                sampled.append((row, logits_row))
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this row's
                log.error("row_not_sampled", exc=error)
                failures[index] = unprepared(error)
        tokens = self._rows.sample(logits, requests)
        results: list[SampleResult] = [
            self._result(index, row, token, logits[logits_row])
            for index, ((row, logits_row), token) in enumerate(zip(sampled, tokens, strict=True))
        ]
        for index, failed in failures.items():  # In ascending order, so that each gets its place.
            results.insert(index, failed)
        return results

    def wait_for_step(self) -> None:
        """Nothing to wait for: on a CPU a step has ended when its call returns."""

    def _result(self, index: int, row: SampleRow, token: int, raw: Tensor) -> SampleResult:
        if token < 0:
            return failure(row)
        if row.params.logprobs is None:
            return Sampled(token_id=token)
        found = self._rows.alternatives(index)
        logprobs = TokenLogprobs(
            logprob=found.logprob,
            rank=found.rank,
            top_ids=tuple(found.top_ids),
            top_logprobs=tuple(found.top_logprobs),
        )
        if row.params.logprob_token_ids:
            listed = logprobs_of(raw.numpy(), row.params, found.log_total)
            logprobs = with_listed(logprobs, row.params, listed)
        return Sampled(token_id=token, logprobs=logprobs)


def _request(row: SampleRow, logits_row: int) -> SampleRequest:
    params = row.params
    return SampleRequest(
        row=logits_row,
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        top_k=params.top_k,
        seed=params.seed,
        choice=row.choice_index,
        position=row.position,
        num_alternatives=params.logprobs,
        edits=_edits(row),
    )


def _edits(row: SampleRow) -> Edits | None:
    params, banned, allowed = row.params, row.banned, row.allowed()
    if not (params.logit_bias or row.penalizes or banned or allowed is not None):
        return None
    return Edits(
        bias=params.logit_bias,
        tokens=row.tokens if row.penalizes else None,
        num_prompt=row.num_prompt,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        banned=banned,
        allowed=allowed,
    )

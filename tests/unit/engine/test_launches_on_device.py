"""Launches on a real device do not wait for it, and two launches in flight do not disturb each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.devices import DEVICE, gpu_only, keep_busy

pytest.importorskip("triton")

from pdserve.base.sampling import SamplingParams
from pdserve.engine.device_batch import DeviceBatches
from pdserve.engine.device_sampler import DeviceSampler
from pdserve.engine.sampler import Sampler
from tests.unit.engine.fakes import row
from tests.unit.engine.test_device_batch import decoding, numbers

pytestmark = gpu_only


def test_two_launches_of_the_sampler_do_not_disturb_each_other() -> None:
    sampler, plain = DeviceSampler(DEVICE), Sampler()
    rows = [row(SamplingParams(seed=seed, temperature=1.0, logprobs=2)) for seed in range(4)]
    logits = [torch.randn(4, 5000, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    there = [each.to(DEVICE) for each in logits]
    sampler.sample(there[0], rows, range(4))  # Compilation at first use waits.
    keep_busy()
    first = sampler.launch(there[0], rows, range(4))
    second = sampler.launch(there[1], rows, range(4), is_ahead=True)
    assert first.copied is not None
    assert not first.copied.query()
    for draws, table in ((first, logits[0]), (second, logits[1])):
        expected = plain.sample(table, rows, range(4))
        results = draws.results()
        assert [getattr(result, "token_id", None) for result in results] == [
            getattr(result, "token_id", None) for result in expected
        ]
        for each in rows:
            each.tokens.append(0)


def test_a_batch_uploaded_to_a_busy_device_is_unchanged() -> None:
    batches = DeviceBatches(DEVICE, 10_000)
    given = [replace(decoding(3), token_ids=numbers(first, first + 1, first + 2)) for first in (10, 20, 30)]
    batches.upload(given[0]).token_ids.clone()  # Allocation at first use waits.
    torch.cuda.synchronize()
    keep_busy()
    busy = torch.cuda.current_stream().record_event()
    there = batches.upload(given[1])
    assert not busy.query()
    seen = [there.token_ids.clone()]
    seen.append(batches.upload(given[2]).token_ids.clone())
    assert [each.tolist() for each in seen] == [[20, 21, 22], [30, 31, 32]]


def test_a_batch_is_uploaded_while_the_previous_step_runs() -> None:
    batches, seen = DeviceBatches(DEVICE, 10_000), []
    sampled = numbers(41, -1, 43).to(DEVICE)
    batches.upload(decoding(3), token_ids=sampled).token_ids.clone()  # What the first use prepares would wait.
    there = batches.upload(decoding(3))
    torch.cuda.synchronize()
    keep_busy()
    seen.append(there.token_ids.clone())  # The step.
    computed = torch.cuda.current_stream().record_event()
    there = batches.upload(decoding(3), token_ids=sampled)
    assert not computed.query()
    seen.append(there.token_ids.clone())
    assert [each.tolist() for each in seen] == [[7, 8, 9], [41, 0, 43]]

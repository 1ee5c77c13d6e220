"""Facts about the simulated GPU, which replaces a real one in tests of code for GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.support.devices import SIMULATED, keep_busy

pytestmark = pytest.mark.skipif(not SIMULATED, reason="no simulated GPU; PDSERVE_TEST_GPU=simulated")

DEVICE = torch.device("cuda", 0)


def there(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def test_ops_match_those_of_the_host() -> None:
    left, right = torch.randn(3, 4), torch.randn(4, 5)
    product = left.to(DEVICE) @ right.to(DEVICE)
    assert (product.device, product.shape) == (DEVICE, (3, 5))
    assert torch.equal(product.cpu(), left @ right)
    transposed = product.t()[1:].contiguous()
    transposed[0] = 7
    transposed.clamp_(max=3)
    expected = (left @ right).t()[1:].contiguous()
    expected[0] = 7
    assert torch.equal(transposed.cpu(), expected.clamp(max=3))
    assert torch.arange(3, device=DEVICE).tolist() == [0, 1, 2]
    assert there(1, 2, 3).sum().item() == 6


def test_a_read_before_the_copy_has_finished_gives_old_data() -> None:
    host, source = pinned(0, 0), there(1, 2)
    keep_busy()
    host.copy_(source, non_blocking=True)
    copied = torch.cuda.current_stream().record_event()
    assert host.tolist() == [0, 0]
    assert not copied.query()
    copied.synchronize()
    assert host.tolist() == [1, 2]
    assert copied.query()


def test_pinned_memory_is_read_when_the_copy_is_executed() -> None:
    host, plain = pinned(1, 2), torch.tensor([1.0, 2.0])
    keep_busy()
    copies = [each.to(DEVICE, non_blocking=True) for each in (host, plain)]
    host += 10
    plain += 10
    assert [each.tolist() for each in copies] == [[11, 12], [1, 2]]


def test_a_copy_is_waited_for_by_default() -> None:
    source, host = there(1, 2), torch.zeros(2)
    keep_busy()
    host.copy_(source)
    assert host.tolist() == [1, 2]


def test_streams_wait_for_each_other_only_on_request() -> None:
    for waits in (False, True):
        made, seen = torch.zeros(2, device=DEVICE), torch.zeros(2, device=DEVICE)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        keep_busy()
        made += 5
        with torch.cuda.stream(side):
            if waits:
                side.wait_stream(torch.cuda.default_stream())
            seen.copy_(made)
            done = side.record_event()
        done.synchronize()
        assert seen.tolist() == ([5, 5] if waits else [0, 0])


def test_freed_memory_is_overwritten_even_if_another_stream_still_reads_it() -> None:
    for waits in (False, True):
        made, seen = there(1, 2), torch.zeros(2, device=DEVICE)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            keep_busy()
            seen.copy_(made)
            read = side.record_event()
        if waits:
            read.wait()
        del made
        torch.cuda.current_stream().synchronize()
        side.synchronize()
        assert seen.isnan().any().item() is not waits


def test_memory_that_a_gpu_cannot_access_is_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        there(1, 2) + torch.ones(2)
    with pytest.raises(TypeError, match="can't convert"):
        there(1).numpy()
    assert (there(1, 2) + torch.tensor(1.0)).tolist() == [2, 3]


def test_a_kernel_refuses_host_memory() -> None:
    pytest.importorskip("triton")
    from kernels.triton import norm

    x, weight = torch.ones(2, 16), torch.ones(16)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        norm.rms_norm(x.to(DEVICE), weight, 1e-6)
    assert norm.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-6).shape == (2, 16)


def test_a_graph_repeats_the_captured_work_on_the_same_memory() -> None:
    given, kept = there(1, 2), torch.zeros(2, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = given * 2
        kept += result + 1
    assert kept.tolist() == [0, 0]
    for factor in (1, 10):
        given.copy_(torch.tensor([1.0, 2.0]) * factor)
        graph.replay()
        assert result.tolist() == [2 * factor, 4 * factor]
    assert kept.tolist() == [3 + 21, 5 + 41]


def test_graphs_that_share_their_memory_overwrite_each_others_results() -> None:
    given, first, second = there(1, 2), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        doubled = given * 2
    with torch.cuda.graph(second, pool=first.pool()):
        tripled = given * 3
    first.replay()
    second.replay()
    assert tripled.tolist() == [3, 6]
    assert doubled.isnan().all()
    first.replay()
    assert doubled.tolist() == [2, 4]


@pytest.mark.parametrize("what", ["a value", "pageable memory", "an event"])
def test_work_that_must_not_be_captured_is_refused(what: str) -> None:
    given, event, side = there(1, 2), torch.cuda.Event(), torch.cuda.Stream()
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        if what == "a value":
            given.sum().item()
        elif what == "pageable memory":
            given.copy_(torch.zeros(2), non_blocking=True)
        else:
            with torch.cuda.stream(side):
                keep_busy()
                event.record()
            event.wait()


def test_memory_is_limited_and_counted() -> None:
    before = torch.cuda.memory_allocated()
    kept = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
    assert torch.cuda.memory_allocated() == before + (1 << 20)
    torch.cuda.reset_peak_memory_stats()
    del kept
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before + (1 << 20)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(torch.cuda.mem_get_info()[0] + 1, dtype=torch.uint8, device=DEVICE)

"""Layer groups between real services: sent while later layers are computed, exact, and checked for nonsense."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.decoder import LayerListener
from kvtransfer.handover.staging import StagedMemory
from kvtransfer.transport import Buffer, Operation, Peer
from kvtransfer.transport.inproc import InprocTransport
from pdserve.base.errors import DigestMismatch, PeerLost, RequestError, SetupError, TransferTimeout
from pdserve.engine.runner import StepDecoder
from pdserve.model.batch import Batch
from pdserve.v1 import common_pb2, decode_pb2, prefill_pb2
from pdserve.worker.kv_bytes import host_blocks as worker_blocks
from tests.integration.services.local_cluster import (
    DEADLINE_S,
    LEASE_S,
    KeptLeases,
    LocalCluster,
    RouterRequest,
    running_cluster,
)
from tests.support.virtual_time import advance
from tests.unit.model.tiny import save_model

NUM_LAYERS = 4
PROMPT = [(7 * position) % 90 + 3 for position in range(45)]  # 11 blocks and a token
NUM_BLOCKS = 12
#: Plain torch computes layer by layer. Its sums depend on the chunk size, which is therefore the same on both workers.
LAYERED: dict[str, Any] = {"kernels": "reference", "kv_cache_memory": 128 * 1024}
ONE_CHUNK = LAYERED | {"max_num_batched_tokens": 64}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("layers"), {"num_hidden_layers": NUM_LAYERS})


class Observed(InprocTransport):
    """Notes when each message is sent, and can hold all of them back or change one."""

    def __init__(self) -> None:
        super().__init__()
        #: Indices of the messages sent so far. Other threads read it, too.
        self.sent: list[int] = []
        self.has_sent = threading.Condition()
        self.wrong: int | None = None
        self.holds_back = False
        self.given_up = asyncio.Event()

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        with self.has_sent:
            index = tag % (1 << 20)
            self.sent.append(index)
            self.has_sent.notify_all()
        if index == self.wrong:
            buffer = np.array(buffer)
            buffer[-1] ^= 1
        if self.holds_back:
            return super().post_send(peer, tag ^ (1 << 63), buffer)
        return super().post_send(peer, tag, buffer)

    def disconnect(self, peer: Peer) -> None:
        self.given_up.set()
        super().disconnect(peer)

    def resume(self) -> None:
        """Lets a paused decoder go on as if another message had been sent."""
        with self.has_sent:
            self.sent.append(-1)
            self.has_sent.notify_all()

    def wait_until_sent(self, count: int) -> bool:
        """False if that does not happen before the deadline. Not for the event loop's thread."""
        with self.has_sent:
            return self.has_sent.wait_for(lambda: len(self.sent) >= count, DEADLINE_S)


class PausingDecoder:
    """Pauses after some layers until a number of messages is on the wire; `after` maps layers to these numbers."""

    def __init__(self, decoder: StepDecoder, wire: Observed, after: dict[int, int]) -> None:
        self._decoder = decoder
        self._wire = wire
        self._after = after
        self.waited: dict[int, bool] = {}

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        def layer_done(num_layers: int) -> None:
            assert on_layer is not None
            on_layer(num_layers)
            if num_layers in self._after:
                self.waited[num_layers] = self._wire.wait_until_sent(self._after[num_layers])

        return self._decoder.forward(batch, kv_cache, layer_done)


def pausing(cluster: LocalCluster, wire: Observed, after: dict[int, int]) -> PausingDecoder:
    runner = cluster.prefill.model.runner
    runner._decoder = decoder = PausingDecoder(runner._decoder, wire, after)
    return decoder


async def handed_over(request: RouterRequest) -> tuple[prefill_pb2.PrefillDone, dict[int, list[int]]]:
    await request.start()
    ticket = await request.ticket()
    done = await request.prefill(ticket)
    return done, await request.finish()


@pytest.mark.parametrize("layer_groups", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [8, 30, 64])  # A chunk of 30 tokens leaves a block half full.
async def test_tokens_are_those_of_local_prefill_in_any_number_of_groups(
    model: Path, layer_groups: int, chunk: int
) -> None:
    common = LAYERED | {"max_num_batched_tokens": chunk}
    async with running_cluster(model, prefill=common, decode=common | {"layer_groups": layer_groups}) as cluster:
        for length in (1, 4, 5, 45):
            request = cluster.request(PROMPT[:length], n=2, temperature=0.9)
            await request.start()
            ticket = await request.ticket()
            assert ticket.layer_groups == layer_groups
            done = await request.prefill(ticket)
            assert done.sent_blocks == ticket.num_blocks
            assert done.sent_bytes == ticket.num_blocks * cluster.decode.model.layout.block_bytes
            tokens = await request.finish()
            fresh = {"prefill": common, "decode": common}
            async with running_cluster(model, **fresh) as other:
                assert tokens == await other.local(PROMPT[:length], n=2, temperature=0.9)
        await cluster.all_free()


@pytest.mark.parametrize(("layer_groups", "ends"), [(2, (2, 4)), (3, (2, 3, 4)), (4, (1, 2, 3, 4))])
async def test_a_group_is_on_the_wire_before_the_next_layers_are_computed(
    model: Path, layer_groups: int, ends: tuple[int, ...]
) -> None:
    wire = Observed()
    async with running_cluster(
        model, prefill_transport=wire, prefill=ONE_CHUNK, decode=ONE_CHUNK | {"layer_groups": layer_groups}
    ) as cluster:
        # The step would never end unless its groups were sent in the meantime, the partial block included.
        decoder = pausing(cluster, wire, {end: NUM_BLOCKS * (group + 1) for group, end in enumerate(ends)})
        done, tokens = await handed_over(cluster.request(PROMPT))
        assert decoder.waited == dict.fromkeys(ends, True)
        assert done.chunks == 1
        # Group by group, each in the order of the blocks.
        assert wire.sent == [
            block * layer_groups + group for group in range(layer_groups) for block in range(NUM_BLOCKS)
        ]
        assert done.exposed_s == 0
        await cluster.all_free()
    async with running_cluster(model, prefill=ONE_CHUNK, decode=ONE_CHUNK) as cluster:
        assert tokens == await cluster.local(PROMPT)


async def test_a_group_of_several_ranks_is_on_the_wire_before_the_next_layers_are_computed(model: Path) -> None:
    wire = Observed()
    ranks = ONE_CHUNK | {"tensor_parallel_size": 2, "staging_memory": 16 * 2048}
    async with running_cluster(
        model, prefill_transport=wire, prefill=ranks, decode=ONE_CHUNK | {"layer_groups": 3}
    ) as cluster:
        assert cluster.prefill.model.rank_group is not None
        # The decoder of rank 0 pauses; the other half of the heads comes from another process.
        decoder = pausing(cluster, wire, {2: NUM_BLOCKS, 3: 2 * NUM_BLOCKS})
        _, tokens = await handed_over(cluster.request(PROMPT))
        assert decoder.waited == {2: True, 3: True}
        await cluster.all_free()
        assert tokens == await cluster.local(PROMPT)


async def test_each_chunk_sends_its_full_blocks_while_it_is_computed(model: Path) -> None:
    wire = Observed()
    common = LAYERED | {"max_num_batched_tokens": 30}
    async with running_cluster(
        model, prefill_transport=wire, prefill=common, decode=common | {"layer_groups": 2}
    ) as cluster:
        waited: list[bool] = []
        expected = iter([7, 14, 14 + 5, 14 + 10])  # 30 tokens fill 7 blocks; the rest of the prompt takes 5 more.
        runner = cluster.prefill.model.runner
        inner = runner._decoder

        class EachChunk:
            def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
                def layer_done(num_layers: int) -> None:
                    assert on_layer is not None
                    on_layer(num_layers)
                    if num_layers in (2, 4):
                        waited.append(wire.wait_until_sent(next(expected)))

                return inner.forward(batch, kv_cache, layer_done)

        runner._decoder = EachChunk()
        done, _ = await handed_over(cluster.request(PROMPT))
        assert (done.chunks, waited) == (2, [True] * 4)
        assert sorted(wire.sent) == [*range(2 * NUM_BLOCKS)]
        await cluster.all_free()


@pytest.mark.advanced_time
async def test_the_first_token_does_not_wait_for_a_wire_that_takes_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One message may be in flight at a time, and it does not get through.
    monkeypatch.setattr("kvtransfer.handover.sender.Sender.__init__.__kwdefaults__", {"max_outstanding_bytes": 1})
    wire = Observed()
    wire.holds_back = True
    async with running_cluster(
        model, prefill_transport=wire, prefill=ONE_CHUNK, decode=ONE_CHUNK | {"layer_groups": 4, "lease_s": LEASE_S}
    ) as cluster:
        request = cluster.request(PROMPT)
        first_token, take = asyncio.Event(), request.take

        def taken(choice: common_pb2.ChoiceTokens) -> None:
            take(choice)
            first_token.set()

        monkeypatch.setattr(request, "take", taken)
        await request.start()
        prefill = asyncio.create_task(request.prefill(await request.ticket()))
        async with asyncio.timeout(DEADLINE_S):
            await first_token.wait()
        assert len(wire.sent) == 1
        assert not prefill.done()
        prefill.cancel()
        request.cancel()
        advance(LEASE_S)  # Until its lease ends, the sender waits for the message that does not get through.
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await prefill
        await cluster.all_free()


@pytest.mark.advanced_time
async def test_a_prompt_may_be_computed_for_longer_than_a_lease(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, wire = KeptLeases(monkeypatch), Observed()
    async with running_cluster(
        model, prefill_transport=wire, prefill=ONE_CHUNK, decode=ONE_CHUNK | {"layer_groups": 2, "lease_s": LEASE_S}
    ) as cluster:
        pausing(cluster, wire, {2: NUM_BLOCKS + 1})
        request = cluster.request(PROMPT)
        await request.start()
        prefill = asyncio.create_task(request.prefill(await request.ticket(), keeps_lease=True))
        assert await asyncio.to_thread(wire.wait_until_sent, NUM_BLOCKS)
        await kept.outlive(LEASE_S)
        assert len(wire.sent) == NUM_BLOCKS
        wire.resume()
        await prefill
        await request.finish()
        await cluster.all_free()


@pytest.mark.advanced_time
async def test_a_wire_that_takes_nothing_ends_the_lease_even_while_the_prompt_is_computed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.handover.sender.Sender.__init__.__kwdefaults__", {"max_outstanding_bytes": 1})
    kept, wire = KeptLeases(monkeypatch), Observed()
    wire.holds_back = True
    async with running_cluster(
        model, prefill_transport=wire, prefill=ONE_CHUNK, decode=ONE_CHUNK | {"layer_groups": 4, "lease_s": LEASE_S}
    ) as cluster:
        decoder = pausing(cluster, wire, {2: 2})  # The second message never leaves.
        request = cluster.request(PROMPT)
        await request.start()
        prefill = asyncio.create_task(request.prefill(await request.ticket(), keeps_lease=True))
        try:
            assert await asyncio.to_thread(wire.wait_until_sent, 1)
            # The session reports progress, and the decode worker's lease is kept. The sender's own is not.
            await kept.since(advance(0.6 * LEASE_S))
            advance(0.6 * LEASE_S)
            async with asyncio.timeout(DEADLINE_S):
                await wire.given_up.wait()
            assert decoder.waited == {}
        finally:
            wire.resume()
        with pytest.raises((TransferTimeout, PeerLost)):
            await prefill
        request.cancel()
        await cluster.all_free()


@pytest.mark.parametrize("wrong", [0, 13, NUM_BLOCKS * 3 - 1])
async def test_a_wrong_byte_in_a_group_is_refused_and_the_decode_worker_computes_the_prompt(
    model: Path, wrong: int
) -> None:
    wire = Observed()
    wire.wrong = wrong
    async with running_cluster(
        model, prefill_transport=wire, prefill=ONE_CHUNK, decode=ONE_CHUNK | {"layer_groups": 3}
    ) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        named = (
            "1 of 36 layer groups of 12 blocks are not what was sent, "
            f"the first is layer group {wrong % 3} of block {wrong // 3}"
        )
        with pytest.raises(DigestMismatch, match=named):
            await request.prefill(await request.ticket())
        forced = [tokens[0] for tokens in request.tokens.values()]
        await request.send(prefill_locally=decode_pb2.PrefillLocally(attempt=2, forced_first_tokens=forced))
        assert await request.finish() == await cluster.local(PROMPT)
        await cluster.all_free()


@pytest.mark.parametrize("nonsense", [0, NUM_LAYERS + 1, (1 << 32) - 1])
async def test_a_ticket_with_an_impossible_number_of_groups_is_refused(model: Path, nonsense: int) -> None:
    async with running_cluster(model, prefill=ONE_CHUNK, decode=ONE_CHUNK) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        ticket = await request.ticket()
        ticket.layer_groups = nonsense
        with pytest.raises(RequestError, match=f"layer_groups is {nonsense}, not 1 to 4"):
            await request.prefill(ticket)
        request.cancel()
        await cluster.all_free()


async def test_a_worker_with_more_groups_than_layers_does_not_start(model: Path) -> None:
    with pytest.raises(SetupError, match="--layer-groups is 5, but the model has 4 layers"):
        async with running_cluster(model, decode=LAYERED | {"layer_groups": 5}):
            pass


async def test_kernels_that_compute_a_step_in_one_call_send_all_groups_at_its_end(model: Path) -> None:
    wire = Observed()
    async with running_cluster(model, prefill_transport=wire, decode={"layer_groups": 4}) as cluster:
        if cluster.prefill.model.kernels.backend != "cpu":
            pytest.skip("the C++ kernels are not built")
        _, tokens = await handed_over(cluster.request(PROMPT))
        assert sorted(wire.sent) == [*range(4 * NUM_BLOCKS)]
        assert tokens == await cluster.local(PROMPT)
        await cluster.all_free()


async def test_groups_pass_through_stages_that_hold_fewer_blocks_than_a_prompt(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[StagedMemory] = []
    num_slots = iter([13, 3])  # The stage of the decode worker is made first.

    def block_memory(kv_cache: Any, staging_bytes: int, *, is_on_device: bool, is_shared: bool) -> StagedMemory:
        stage = torch.zeros(next(num_slots) * kv_cache.layout.block_bytes, dtype=torch.uint8)
        stages.append(worker_blocks.staged(kv_cache, stage, bundle_blocks=1))
        return stages[-1]

    monkeypatch.setattr("pdserve.worker.serve.worker.block_memory", block_memory)
    wire = Observed()
    common = ONE_CHUNK | {"kv_cache_memory": 256 * 1024}
    async with running_cluster(
        model, prefill_transport=wire, prefill=common, decode=common | {"layer_groups": 3}
    ) as cluster:
        decoder = pausing(cluster, wire, {2: NUM_BLOCKS})
        prompts = [[(7 * first + 3 * position) % 97 for position in range(45)] for first in range(3)]
        requests = [cluster.request(prompt) for prompt in prompts]
        for request in requests:
            await request.start()

        async def hand_over(request: RouterRequest) -> dict[int, list[int]]:
            await request.prefill(await request.ticket())
            return await request.finish()

        tokens = await asyncio.gather(*map(hand_over, requests))
        assert decoder.waited == {2: True}
        assert all(stage.num_free == stage.max_blocks for stage in stages)
        assert [stage.max_blocks for stage in stages] == [13, 3]
        await cluster.all_free()
        monkeypatch.undo()
    async with running_cluster(model, prefill=common, decode=common) as cluster:
        assert tokens == [await cluster.local(prompt) for prompt in prompts]


async def test_the_transfer_time_after_the_last_kernel_is_reported_and_counted(model: Path) -> None:
    async with running_cluster(model, prefill=ONE_CHUNK, decode=ONE_CHUNK) as cluster:
        done, _ = await handed_over(cluster.request(PROMPT))
        # With one group, nothing is sent before the step is over.
        assert 0 < done.exposed_s <= done.commit_s
        sample = cluster.prefill.metrics.registry.get_sample_value
        labels = {"model_name": "tiny", "tier": "prefill"}
        assert sample("pdserve_kv_transfer_exposed_seconds_count", labels) == 1
        assert sample("pdserve_kv_transfer_exposed_seconds_sum", labels) == pytest.approx(done.exposed_s)
        ended = await cluster.request(PROMPT, max_tokens=1).prefill(None)
        assert ended.exposed_s == 0
        assert sample("pdserve_kv_transfer_exposed_seconds_count", labels) == 1

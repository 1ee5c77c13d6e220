"""Messages of any size arrive as they were sent, and the end of a stream is recognized."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest
import torch

from pdserve.model.batch import TENSORS, Batch
from pdserve.worker.ranks.messages import MessageKind, MessageReader, RankMessage, StepWriter, encode


def batch(num_sequences: int, num_blocks: int) -> Batch:
    """One row per sequence, with numbers that identify each field."""
    rows = torch.arange(num_sequences)
    return Batch(
        token_ids=rows + 1000,
        positions=rows + 2000,
        slot_mapping=rows - 1,
        query_starts=torch.arange(num_sequences + 1),
        context_lens=rows + 3000,
        block_tables=torch.arange(num_sequences * num_blocks).view(num_sequences, num_blocks),
        logits_rows=rows[:1],
    )


def received(reader: MessageReader) -> RankMessage:
    message = reader.receive()
    assert message is not None
    return message


def test_batches_arrive_on_every_socket_whole_and_in_order() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    # Larger than a socket accepts at a time, and larger than the reserved memory.
    sent = [batch(3, 2), batch(64, 512), batch(1, 1)]

    def send() -> None:
        writer = StepWriter([ours for ours, _ in pairs])
        for number, next_batch in enumerate(sent):
            writer.forward(number, next_batch)
        writer.copy_blocks(9, [(4, 5), (5, 6)])

    sender = threading.Thread(target=send)
    sender.start()
    readers = [MessageReader(theirs) for _, theirs in pairs]
    for number, expected in enumerate(sent):
        for reader in readers:
            message = received(reader)
            assert (message.kind, message.number) == (MessageKind.FORWARD, number)
            for name in TENSORS:
                assert torch.equal(getattr(message.batch(), name), getattr(expected, name)), name
    for reader in readers:
        message = received(reader)
        assert (message.kind, message.number, message.values.tolist()) == (MessageKind.COPY_BLOCKS, 9, [4, 5, 5, 6])
    sender.join()
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


@pytest.mark.parametrize("reports_layers", [False, True])
@pytest.mark.parametrize("hidden_only", [False, True])
def test_flags_of_a_step_arrive(reports_layers: bool, hidden_only: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        StepWriter([ours]).forward(1, replace(batch(3, 2), hidden_only=hidden_only), reports_layers=reports_layers)
        message = received(MessageReader(theirs))
        assert (message.reports_layers, message.batch().hidden_only) == (reports_layers, hidden_only)


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_graph_to_record_arrives(is_idle: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        StepWriter([ours]).record(3, is_idle=is_idle)
        message = received(MessageReader(theirs))
        assert (message.kind, message.number, message.values.tolist()) == (MessageKind.RECORD, 3, [int(is_idle)])


def test_small_messages_may_be_sent_together() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(encode(MessageKind.READ_BLOCKS, 7, [1, 2]) + encode(MessageKind.DONE, 7))
        reader = MessageReader(theirs)
        first = received(reader)
        assert (first.kind, first.number, first.values.tolist()) == (MessageKind.READ_BLOCKS, 7, [1, 2])
        second = received(reader)
        assert (second.kind, second.values.tolist()) == (MessageKind.DONE, [])
        assert reader.receive() is None


def test_a_stream_that_ends_within_a_message_counts_as_ended() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(encode(MessageKind.READ_BLOCKS, 7, [1, 2])[:-3])
        assert MessageReader(theirs).receive() is None

"""Transfers of one or several KV groups: messages are numbered without gaps, and tickets carry their shape."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.handover.layer_groups import LayerGroups
from kvtransfer.handover.ticket import Ticket, ticket_from_proto, ticket_to_proto
from pdserve.v1 import decode_pb2
from tests.support.groups import TWO_GROUPS
from tests.support.handover import LAYOUT
from tests.support.tickets import a_ticket


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    layout = draw(st.sampled_from([LAYOUT, TWO_GROUPS]))
    end = draw(st.integers(0, 9))
    first, *others = [draw(st.integers(0, end)) for _ in layout.groups]
    return replace(
        a_ticket(),
        layout=layout,
        first_block=first,
        num_blocks=end - first,
        other_first_blocks=tuple(others),
        bundle_blocks=draw(st.integers(1, 4)),
        layer_groups=draw(st.integers(1, layout.num_layers)),
    )


@settings(max_examples=60)
@given(ticket=tickets())
def test_every_byte_of_every_missing_block_is_in_one_message(ticket: Ticket) -> None:
    shape, groups, layout = ticket.shape, ticket.groups, ticket.layout
    bundles = [
        (kv_group, bundle)
        for kv_group, first in enumerate(ticket.first_blocks)
        for bundle in shape.bundles(range(first, ticket.end))  # type: ignore[arg-type]
    ]
    sent = []
    # KV group by KV group, and in each of them bundle by bundle.
    messages = [
        (bundle, layer_group)
        for bundle, (kv_group, _) in enumerate(bundles)
        for layer_group, its_kv_group in enumerate(groups.kv_groups)
        if its_kv_group == kv_group
    ]
    assert shape.num_messages == len(messages)
    for index, (bundle, layer_group) in enumerate(messages):
        assert (shape.bundle_of(index), shape.layer_group_of(index)) == (bundle, layer_group)
        assert index in shape.indices_of(layer_group)
        kv_group, block_ids = bundles[bundle]
        assert groups.kv_groups[layer_group] == kv_group
        layers = range(layout.groups[kv_group].num_layers)[groups.layers[layer_group]]
        sent += [(kv_group, block, layer) for block in block_ids for layer in layers]
    wanted = [
        (kv_group, block, layer)
        for kv_group, group in enumerate(layout.groups)
        for block in range(ticket.first_blocks[kv_group], ticket.end)
        for layer in range(group.num_layers)
    ]
    assert sorted(sent) == wanted
    assert [kv_group for kv_group, *_ in sent] == sorted(kv_group for kv_group, *_ in sent)
    assert shape.num_messages == sum(len(shape.indices_of(group)) for group in range(groups.count))
    assert shape.num_blocks == sum(len(blocks) for _, blocks in bundles)
    assert shape.num_bundles == len(bundles)


@settings(max_examples=60)
@given(ticket=tickets())
def test_a_ticket_survives_the_wire(ticket: Ticket) -> None:
    wire = ticket_to_proto(ticket).SerializeToString()
    assert ticket_from_proto(decode_pb2.Ticket.FromString(wire)) == ticket


@settings(max_examples=40)
@given(count=st.integers(1, TWO_GROUPS.num_layers))
def test_a_layer_group_is_complete_with_its_last_layer(count: int) -> None:
    groups = LayerGroups.of(TWO_GROUPS, count)
    for num_layers in range(TWO_GROUPS.num_layers + 1):
        complete = [
            group
            for group in range(groups.count)
            if all(
                layer < num_layers for layer in TWO_GROUPS.groups[groups.kv_groups[group]].layers[groups.layers[group]]
            )
        ]
        assert groups.completed_by(num_layers) == complete
    assert groups.report_layers[-1] == TWO_GROUPS.num_layers

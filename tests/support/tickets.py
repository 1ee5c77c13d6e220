"""A valid ticket for tests."""

from __future__ import annotations

from kvtransfer.handover.ticket import Ticket, new_key, new_tag_base
from pdserve.base.ids import WorkerId, new_epoch, new_transfer_id
from tests.support.handover import LAYOUT


def a_ticket() -> Ticket:
    return Ticket(
        transfer_id=new_transfer_id(),
        attempt=2,
        worker_id=WorkerId("d0"),
        epoch=new_epoch(),
        grpc_address="127.0.0.1:1",
        transport="ucx",
        data_address=b"somewhere",
        first_block=3,
        num_blocks=5,
        bundle_blocks=2,
        digest="nh",
        layout=LAYOUT,
        lease_s=20.0,
        key=new_key(),
        tag_base=new_tag_base(),
        layer_groups=2,
    )

"""What UCX writes about an endpoint, as `ucp_ep_print_info` of UCX 1.21 does."""

from __future__ import annotations

import pytest

pytest.importorskip("ucxx")

from kvtransfer.transport.ucx_lanes import protocol_in

DESCRIPTION = """\
# UCP endpoint
#
# +--------------------------------+-----------------------------------------------------------+
# | ucp_context_0 intra-node cfg#0 | active message by ucp_am_send*(multi) from host memory    |
# +--------------------------------+----------------------------------------------+------------+
# |                        0..8184 | short                                        | tcp/lo     |
# |                        8K..inf | (?) rendezvous something else                | cma/memory |
# +--------------------------------+----------------------------------------------+------------+
#
# +--------------------------------+------------------------------------------------------------+
# | ucp_context_0 intra-node cfg#0 | tagged message by ucp_tag_send*(multi) from host memory    |
# +--------------------------------+-----------------------------------------------+------------+
# |                         0..626 | eager short                                   | tcp/lo     |
# |                        8K..inf | (?) rendezvous zero-copy read from remote     | cma/memory |
# +--------------------------------+-----------------------------------------------+------------+
#
"""
FROM_GPU = """\
# +--------------------------------+-------------------------------------------------------------------------+
# | ucp_context_0 intra-node cfg#0 | tagged message by ucp_tag_send* from cuda/GPU0                          |
# +--------------------------------+-------------------------------------------------------------+-----------+
# |                        0..3892 | eager copy-in copy-out                                      | tcp/eth0  |
# |                      3893..inf | rendezvous cuda_copy, fenced write to remote, frag host     | tcp/eth0  |
# +--------------------------------+-------------------------------------------------------------+-----------+
#
"""


@pytest.mark.parametrize(
    ("description", "device_memory", "protocol"),
    [
        (DESCRIPTION, False, "rendezvous zero-copy read from remote"),
        (DESCRIPTION, True, ""),
        (FROM_GPU + DESCRIPTION, True, "rendezvous cuda_copy, fenced write to remote, frag host"),
        (FROM_GPU + DESCRIPTION, False, "rendezvous zero-copy read from remote"),
        (DESCRIPTION + FROM_GPU, True, "rendezvous cuda_copy, fenced write to remote, frag host"),
        ("# UCP endpoint\n#\n", False, ""),
        ("", True, ""),
    ],
)
def test_the_protocol_of_large_messages_is_found(description: str, device_memory: bool, protocol: str) -> None:
    assert protocol_in(description, device_memory=device_memory) == protocol

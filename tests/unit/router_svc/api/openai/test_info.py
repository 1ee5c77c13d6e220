"""The endpoints that return information."""

from __future__ import annotations

import aiohttp

from tests.support.callbacks import LIMIT_S, longest_callback
from tests.support.console import FakeCluster, request_record, serving

MANY = 1000


async def test_a_list_of_many_requests_does_not_hold_the_event_loop() -> None:
    """Found by fuzzing: a thousand records were shaped and encoded in one callback of 25 ms."""
    fake = FakeCluster(capacity=MANY)
    for index in range(MANY):
        fake.recent.add(request_record(f"cmpl-{index}"))
    async with serving(fake) as (url, _), aiohttp.ClientSession() as http:

        async def read() -> None:
            async with http.get(f"{url}/v1/requests?limit={MANY}") as response:
                content = await response.read()
            assert response.status == 200
            assert content.count(b'"request_id"') == MANY

        longest = await longest_callback(read)
    assert longest.seconds < LIMIT_S, longest.callback

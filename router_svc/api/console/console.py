"""The console as one component: its page, the stream of states, and the task that reads them."""

from __future__ import annotations

from aiohttp import web

from router_svc.api.console.events import ConsoleEvents
from router_svc.api.console.feed import Feed
from router_svc.api.console.load import LoadHistory
from router_svc.api.console.page import console_page
from router_svc.api.console.state import ClusterState, Sources

#: Samples of the load that are kept: one per 5 s, hence the last ten minutes.
HISTORY_SAMPLES = 120


class Console:
    """/console and everything below it. Reads the cluster, and changes nothing."""

    def __init__(self, sources: Sources, *, max_readers: int) -> None:
        self.feed = Feed(ClusterState(sources, history=LoadHistory(HISTORY_SAMPLES)), max_readers=max_readers)

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        # The stream's path comes first: the page's matches it, too.
        return [*ConsoleEvents(self.feed).routes(), *console_page().routes()]

    async def run(self) -> None:
        """Follows the cluster until cancelled."""
        await self.feed.run()

    async def close(self, _: web.Application) -> None:
        """Ends the streams, because the application shuts down."""
        self.feed.close()

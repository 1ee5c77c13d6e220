"""`make screenshot`: a picture of the console with a cluster that has just answered requests, for README and docs."""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
from pathlib import Path

import openai

from tests.arch.documents import ROOT
from tests.support.browser import find_chromium, open_browser
from tests.support.cluster import Cluster, running_cluster

PICTURE = ROOT / "docs/operations/console.png"
MAX_BYTES = 200_000
SIZE = (1280, 800)
_TOPICS = ("photosynthesis", "tides", "glaciers", "bread", "compilers", "bridges", "bees", "radio", "maps", "clocks")
#: Uncached prompts long enough to be handed over.
_QUESTION = "Explain in two sentences how {topic} work, for a reader who is new to them. " * 8


async def _ask_all(cluster: Cluster) -> str:
    """Sends chats in pairs, then one that runs alone. Returns the id of the last one."""
    model = cluster.view().router.model
    async with cluster.async_client() as client:

        async def ask(topic: str, max_tokens: int) -> str:
            message: openai.types.chat.ChatCompletionUserMessageParam = {
                "role": "user",
                "content": _QUESTION.format(topic=topic),
            }
            answer = await client.chat.completions.create(
                model=model, messages=[message], max_tokens=max_tokens, seed=1
            )
            return answer.id

        for first, second in itertools.pairwise(_TOPICS):
            await asyncio.gather(ask(first, 24), ask(f"{first} and {second}", 48))
        return await ask("lighthouses", 40)


async def _take(cluster: Cluster, browser_command: str) -> None:
    request_id = await _ask_all(cluster)
    async with open_browser(browser_command) as browser:
        await browser.resize(*SIZE)
        await browser.prefer(prefers_color_scheme="light", prefers_reduced_motion="reduce")
        await browser.open(f"{cluster.base_url}/console/#/requests/{request_id}")
        await browser.until("document.querySelectorAll('.trace .bars li').length >= 7")
        await browser.until("document.querySelectorAll('#view-requests .requests li').length >= 16")
        await browser.until("document.querySelector('.spark .line').getAttribute('d') !== null")
        assert browser.errors == []
        await browser.screenshot(PICTURE)


def main() -> int:
    """Writes the picture. Returns the exit status."""
    command = find_chromium()
    if command is None:
        print("No Chromium here: install it, for example Debian's package chromium.")
        return 1
    flags = ("--local-prefill", "threshold")
    with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory), *flags) as cluster:
        asyncio.run(_take(cluster, command))
    size = PICTURE.stat().st_size
    print(f"{PICTURE.relative_to(ROOT)}: {size:,} bytes")
    return 0 if size <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())

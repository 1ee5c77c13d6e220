"""The Redis of the manifests: a version without known holes, which keeps what nothing writes again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdserve.base.option_values import parse_bytes
from pdserve.redis.store import Store
from tests.deploy.manifests import NAMES, of_kind, workloads
from tests.deploy.pods import Node

#: The first version of its series without CVE-2025-49844, by which a client with the password runs code in Redis.
OLDEST = (7, 4, 6)


def test_redis_has_a_full_version_without_known_holes() -> None:
    images = {
        container["image"]
        for name in NAMES
        for workload in workloads(name)
        for container in workload.all_containers
        if container["image"].partition(":")[0] == "redis"
    }
    assert images
    for image in images:
        match = re.fullmatch(r"redis:(\d+)\.(\d+)\.(\d+)-bookworm", image)
        assert match is not None, image
        assert tuple(map(int, match.groups())) >= OLDEST, image


@pytest.mark.parametrize("component", ["redis", "state"])
def test_one_process_alone_has_the_volume_and_memory_to_write_its_log_anew(component: str) -> None:
    for name in NAMES:
        claim = f"pdserve-{component}"
        owners = [
            each
            for each in workloads(name)
            for volume in each.spec["volumes"]
            if volume.get("persistentVolumeClaim", {}).get("claimName") == claim
        ]
        assert [each.component for each in owners] == [
            each.component for each in workloads(name) if each.component == component
        ]
        claims = [each for each in of_kind(name, "PersistentVolumeClaim") if each["metadata"]["name"] == claim]
        assert len(claims) == len(owners), name
        for each, volume in zip(owners, claims, strict=True):
            # A Deployment starts a second pod while the first one still ends, unless one pod alone may have the volume.
            is_exclusive = volume["spec"]["accessModes"] == ["ReadWriteOncePod"]
            assert each.title.endswith(f"StatefulSet/{claim}") or is_exclusive
            assert each.replicas == 1
            [container] = each.containers
            script = container["command"][2]
            assert "--dir /data" in script
            assert "--appendonly yes" in script
            assert "--maxmemory-policy noeviction" in script
            [memory_bytes] = re.findall(r"--maxmemory (\d+mb)", script)
            assert 2 * parse_bytes(f"{memory_bytes[:-2]}MiB") <= parse_bytes(container["resources"]["limits"]["memory"])
            # The log, a new one, and what was written meanwhile.
            size = parse_bytes(volume["spec"]["resources"]["requests"]["storage"])
            assert size >= 8 * parse_bytes(f"{memory_bytes[:-2]}MiB")


@pytest.mark.deploy
async def test_usage_and_budgets_outlive_a_kill_of_redis(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with node.running():
        for number in range(2):
            await node.start_redis()
            async with Store(node.url_of("redis")) as store:
                assert await store.call("HINCRBY", "pd:usage:2026-11-28", "requests", 1) == number + 1
            node.kill_all()

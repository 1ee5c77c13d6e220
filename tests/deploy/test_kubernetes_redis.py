"""The Redis of the manifests: a version without known holes, which keeps what nothing writes again."""

from __future__ import annotations

import re

from tests.deploy.manifests import NAMES, workloads

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

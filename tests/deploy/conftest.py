"""Images and stacks of the tests that run containers; skipped, with the reason, where there is no engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.compose_files import BASE, COMPOSE, STACKS, load
from tests.deploy.engine import (
    PREFIX,
    base_image,
    build_image,
    package_index,
    pdserve_images,
    redis_image,
    why_no_engine,
)
from tests.deploy.notes import NOTES
from tests.deploy.stack import Stack
from tests.support.cluster import free_port

#: Workers that share the cores while a tier is scaled up.
_CLAIM_WORKERS = "2"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows what tests measured."""
    for line in NOTES:
        terminalreporter.write_line(f"measured: {line}")


@pytest.fixture(params=STACKS, ids="+".join)
def services(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The services of each stack of compose files."""
    found: dict[str, Any] = load(*request.param)["services"]
    return found


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Our images, built; the variables that name them and their base in the compose file."""
    reason = why_no_engine()
    if reason:
        pytest.skip(f"no containers: {reason}")
    work = tmp_path_factory.mktemp("images")
    base = base_image(work)
    variables = pdserve_images(base, build_image(base, work))
    default = (COMPOSE / BASE).read_text(encoding="utf-8").partition("${REDIS_IMAGE:-")[2].partition("}")[0]
    return {**variables, "REDIS_IMAGE": redis_image(base, default, work)}


def _override(work: Path) -> Path:
    """What this machine needs beyond the compose file: a way to the package index."""
    index = package_index()
    (work / "pip.conf").write_text(index.pip_conf(with_wheels=False), encoding="utf-8")
    model: dict[str, object] = {"network_mode": "host"}
    mounts = [f"{work / 'pip.conf'}:/etc/pip.conf:ro"]
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.exists():
        mounts.append(f"{certificates}:{certificates}:ro")
    path = work / "override.yaml"
    path.write_text(json.dumps({"services": {"model": {**model, "volumes": mounts}}}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def stack(images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The CPU stack, ready to answer."""
    work = tmp_path_factory.mktemp("stack")
    work.chmod(0o755)
    port = free_port()
    variables = {
        **images,
        "COMPOSE_PROJECT_NAME": PREFIX,
        "PDSERVE_PORT": str(port),
        "PDSERVE_GRPC_PORT": str(port + 1),
        "PDSERVE_ADMIN_PORT": str(port + 2),
        "PDSERVE_CLAIM_WORKERS": _CLAIM_WORKERS,
        # Each worker of a tier that is scaled up has one.
        "PDSERVE_KV_CACHE_MEMORY": "512MiB",
    }
    stack = Stack(port=port, admin_port=port + 2, variables=variables, overrides=(_override(work),))
    stack.down()
    try:
        stack.up()
        yield stack
    except BaseException:
        print(stack.logs()[-6000:])
        raise
    finally:
        stack.down()

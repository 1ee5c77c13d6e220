"""The container engine of this machine, and the images that the tests of containers use.

What a registry would give is made here if there is none: a base image by debootstrap, and Redis from Debian's packages.
How this machine reaches a package index (pip's configuration, certificates) goes into the image that builds, and into
no other.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.arch.documents import ROOT
from tests.deploy.dockerfile import arguments

PREFIX = "pdserve-test"
_PULL_TIMEOUT_S = 300
_PACKAGES = "python3,python3-venv,ca-certificates"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def run(*command: str | Path, environment: Mapping[str, str] | None = None, timeout_s: float | None = None) -> str:
    """The output of a command that has to succeed; what it printed is in the error when it does not."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **(environment or {})},
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{shlex.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout


def succeeds(*command: str) -> bool:
    """Whether a command ends with exit code 0."""
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=_PULL_TIMEOUT_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@cache
def why_no_engine() -> str:
    """Why containers cannot be run here; empty if they can."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    if not succeeds("docker", "info"):
        return "no Docker engine answers"
    if not compose_command():
        return "neither docker compose nor docker-compose is installed"
    return ""


@cache
def compose_command() -> tuple[str, ...]:
    """Compose as a plugin of docker, or as a program of its own; empty without it."""
    if succeeds("docker", "compose", "version"):
        return ("docker", "compose")
    return ("docker-compose",) if succeeds("docker-compose", "version") else ()


@cache
def builder() -> dict[str, str]:
    """Variables for the builder that docker has: BuildKit, or the one before it."""
    return {} if succeeds("docker", "buildx", "version") else {"DOCKER_BUILDKIT": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageIndex:
    """How pip reaches packages on this machine, for pip in a container."""

    #: Lines of a pip.conf.
    settings: tuple[str, ...]
    #: Directory with wheels of this machine; None without one.
    wheels: Path | None

    def pip_conf(self, *, with_wheels: bool) -> str:
        """The content of a pip.conf for a container that has our certificates at their usual place."""
        wheels = ["find-links = /opt/wheels"] if with_wheels and self.wheels is not None else []
        return "\n".join(["[global]", *self.settings, *wheels, ""])


def package_index() -> PackageIndex:
    """Read from pip's own configuration, files and environment alike. Addresses that are files stay behind."""
    listed = run(sys.executable, "-m", "pip", "config", "list")
    found = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    settings = [f"{key} = {found[key]}" for key in ("index-url", "default-timeout", "trusted-host") if key in found]
    if "index-url" in found and found["index-url"].startswith("file:"):
        settings = []
    if _CERTIFICATES.exists():
        settings.append(f"cert = {_CERTIFICATES}")
    wheels = next((Path(link) for link in found.get("find-links", "").split() if Path(link).is_dir()), None)
    return PackageIndex(settings=tuple(settings), wheels=wheels)


def exists(image: str) -> bool:
    """Whether the engine has an image."""
    return succeeds("docker", "image", "inspect", image)


def size_bytes(image: str) -> int:
    """The size of an image with all of its layers."""
    [image_facts] = json.loads(run("docker", "image", "inspect", image))
    return int(image_facts["Size"])


def base_image(work: Path) -> str:
    """A base image: the Dockerfile's own if it can be had, else one of this machine's distribution. May skip."""
    default = arguments()["BASE_IMAGE"]
    if exists(default) or succeeds("docker", "pull", "--quiet", default):
        return default
    image = f"{PREFIX}/base"
    if not exists(image):
        if shutil.which("debootstrap") is None or os.geteuid() != 0:
            pytest.skip(f"{default} cannot be pulled, and making a base image needs root and debootstrap")
        _bootstrap(image, work / "base")
    return image


def _bootstrap(image: str, directory: Path) -> None:
    release = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text(encoding="utf-8").splitlines() if "=" in line
    )
    targets = run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Component: main")
    mirror = targets.splitlines()[0]
    codename = release["VERSION_CODENAME"].strip('"')
    run("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", codename, directory, mirror)
    run("sh", "-c", f"tar -C {shlex.quote(str(directory))} -c . | docker import - {image}")
    shutil.rmtree(directory)


def build_image(base: str, work: Path) -> str:
    """The base image with what this machine needs to reach a package index."""
    context = work / "build"
    context.mkdir()
    index = package_index()
    (context / "pip.conf").write_text(index.pip_conf(with_wheels=True), encoding="utf-8")
    lines = [f"FROM {base}", "COPY pip.conf /etc/pip.conf"]
    if _CERTIFICATES.exists():
        shutil.copyfile(_CERTIFICATES, context / "certificates.crt")
        lines.append(f"COPY certificates.crt {_CERTIFICATES}")
    if index.wheels is not None:
        shutil.copytree(index.wheels, context / "wheels")
        lines.append("COPY wheels /opt/wheels")
    return _build(f"{PREFIX}/build", context, lines)


def redis_image(base: str, default: str, work: Path) -> str:
    """Redis: the compose file's own image if it can be had, else one from the distribution's packages."""
    if base == arguments()["BASE_IMAGE"] and (exists(default) or succeeds("docker", "pull", "--quiet", default)):
        return default
    context = work / "redis"
    context.mkdir()
    install = "apt-get update && apt-get install -y --no-install-recommends redis-server"
    # As in the official image, so that a volume begins as this user's.
    directory = "mkdir /data && chown 999:999 /data"
    return _build(f"{PREFIX}/redis", context, [f"FROM {base}", f"RUN {install} && {directory}", "WORKDIR /data"])


def _build(image: str, context: Path, lines: Sequence[str]) -> str:
    (context / "Dockerfile").write_text("\n".join([*lines, ""]), encoding="utf-8")
    run("docker", "build", "--network", "host", "-t", image, context, environment=builder())
    return image


def pdserve_images(base: str, build: str) -> dict[str, str]:
    """Builds our images with the compose file, as a user does. Returns the variables that name them in it."""
    variables = {
        "BASE_IMAGE": base,
        "BUILD_IMAGE": build,
        "PDSERVE_ROUTER_IMAGE": f"{PREFIX}/router",
        "PDSERVE_WORKER_IMAGE": f"{PREFIX}/cpu",
        "COMPOSE_PROJECT_NAME": PREFIX,
    }
    compose = [*compose_command(), "-f", str(ROOT / "compose/compose.yaml")]
    override = ROOT / "tests/deploy/data/host-network.yaml"
    run(*compose, "-f", override, "build", "secrets", "model", environment={**builder(), **variables})
    return variables

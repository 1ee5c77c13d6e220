"""The images as they were built: their sizes, what is in them, and what they are allowed to do."""

from __future__ import annotations

import json

import pytest

from tests.deploy.engine import run, size_bytes
from tests.deploy.notes import note

pytestmark = pytest.mark.deploy

MB = 1_000_000
#: The most that an image may add to its base.
LIMITS = {"PDSERVE_ROUTER_IMAGE": 150 * MB, "PDSERVE_WORKER_IMAGE": 1_300 * MB}
#: A user id that /etc/passwd does not have, as OpenShift gives to containers.
ARBITRARY_USER = "1000660000:0"


def python(image: str, program: str, *flags: str) -> str:
    """What a Python program prints in a container of this image."""
    entry = ("--entrypoint", "python", "--network", "none")
    return run("docker", "run", "--rm", *entry, *flags, image, "-c", program).strip()


@pytest.mark.parametrize("image", LIMITS)
def test_an_image_adds_little_to_its_base(images: dict[str, str], image: str) -> None:
    added = size_bytes(images[image]) - size_bytes(images["BASE_IMAGE"])
    note(f"{image} adds {added / MB:.0f} MB to its base")
    assert added < LIMITS[image]


def test_the_router_has_no_torch(images: dict[str, str]) -> None:
    program = "import importlib.util as i; print([n for n in ('torch', 'triton', 'numpy') if i.find_spec(n)])"
    assert python(images["PDSERVE_ROUTER_IMAGE"], program) == "[]"


def test_workers_have_the_kernels_of_every_instruction_set(images: dict[str, str]) -> None:
    program = "from kernels.cpu import native; print(native.missing_reason(), len(native.load().__file__) > 0)"
    assert python(images["PDSERVE_WORKER_IMAGE"], program) == "None True"
    symbols = "import kernels.cpu.native as n; text = open(n.load().__file__, 'rb').read()"
    names = "('portable', 'avx2', 'avx512', 'avx512_bf16')"
    program = f"{symbols}; print(all(name.encode() in text for name in {names}))"
    assert python(images["PDSERVE_WORKER_IMAGE"], program) == "True"


@pytest.mark.parametrize("user", ["1000:0", ARBITRARY_USER])
def test_a_worker_runs_as_any_user_with_a_root_that_is_read_only(images: dict[str, str], user: str) -> None:
    program = (
        "import getpass, os, pathlib, tempfile, torch, ucxx; pathlib.Path.home().joinpath('x').touch();"
        "tempfile.TemporaryFile(); print(getpass.getuser(), os.getuid(), os.getgid())"
    )
    flags = ("--user", user, "--read-only", "--cap-drop", "ALL")
    scratch = ("--tmpfs", "/tmp:mode=1777", "--tmpfs", "/var/cache/pdserve:mode=1777")
    assert python(images["PDSERVE_WORKER_IMAGE"], program, *flags, *scratch) == f"pdserve {user.replace(':', ' ')}"


@pytest.mark.parametrize("image", LIMITS)
def test_group_0_may_write_where_pdserve_writes_and_nowhere_else(images: dict[str, str], image: str) -> None:
    paths = "('/models', '/secrets', '/secrets/peers', '/var/cache/pdserve', '/opt/pdserve', '/etc')"
    program = f"import os; print([path for path in {paths} if os.access(path, os.W_OK)])"
    found = python(images[image], program, "--user", ARBITRARY_USER, "--cap-drop", "ALL")
    assert found == "['/models', '/secrets', '/secrets/peers', '/var/cache/pdserve']"


@pytest.mark.parametrize("image", LIMITS)
def test_the_sbom_lists_what_is_installed(images: dict[str, str], image: str) -> None:
    document = json.loads(
        run("docker", "run", "--rm", "--entrypoint", "cat", images[image], "/opt/pdserve/sbom.cdx.json")
    )
    assert document["bomFormat"] == "CycloneDX"
    listed = {component["name"].lower().replace("_", "-") for component in document["components"]}
    program = "from importlib.metadata import distributions as d; print(*{x.metadata['Name'] for x in d()})"
    installed = {name.lower().replace("_", "-") for name in python(images[image], program).split()}
    assert installed - {"pdserve"} <= listed
    assert ("torch" in listed) == (image == "PDSERVE_WORKER_IMAGE")


@pytest.mark.parametrize("image", LIMITS)
def test_nothing_of_the_image_that_builds_is_left(images: dict[str, str], image: str) -> None:
    paths = "'/etc/pip.conf', '/etc/ssl/certs/ca-certificates.crt', '/opt/wheels'"
    program = (
        f"import hashlib, pathlib; print([hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else p.exists() "
        f"for p in map(pathlib.Path, ({paths}))])"
    )
    base = run("docker", "run", "--rm", "--entrypoint", "python3", images["BASE_IMAGE"], "-c", program)
    assert python(images[image], program) == base.strip()


def test_the_health_check_fails_without_a_service(images: dict[str, str]) -> None:
    program = (
        "import subprocess as s;"
        "print([s.run(['pdserve', 'health', *url]).returncode for url in ([], ['127.0.0.1:9100'])])"
    )
    assert python(images["PDSERVE_WORKER_IMAGE"], program).endswith("[1, 1]")

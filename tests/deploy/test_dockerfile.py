"""The Dockerfile: hadolint, and what it cannot see."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.arch.documents import ROOT
from tests.deploy.compose_files import BASE, COMPOSE, GPU, load
from tests.deploy.dockerfile import TEXT, arguments, environment, lineage, stages

IMAGES = ("router", "cpu", "cuda")


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    found = subprocess.run([hadolint, COMPOSE / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


def test_builders_without_buildkit_can_build_it() -> None:
    for stage in stages().values():
        for kind, text in stage.instructions:
            assert "--mount" not in text
            assert not re.search(r"<<-?\w", text)
            if kind in ("COPY", "ADD"):
                assert set(re.findall(r"--(\w+)", text)) <= {"from", "chown"}
    assert "# syntax=" not in TEXT


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_nothing_of_the_image_that_builds_it(image: str) -> None:
    assert lineage(image)[0].base == "${BASE_IMAGE}"
    copied = [text for stage in lineage(image) for text in stage.of("COPY")]
    assert [re.sub(r"^--from=[a-z]+-environment ", "", text) for text in copied] == ["/opt/pdserve /opt/pdserve"]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_a_user_in_group_0(image: str) -> None:
    users = [text for stage in lineage(image) for text in stage.of("USER")]
    assert users[-1] == "1000:0"


@pytest.mark.parametrize("image", IMAGES)
def test_process_1_is_ours_and_gets_the_signals(image: str) -> None:
    for kind in ("ENTRYPOINT", "CMD"):
        for text in [text for stage in lineage(image) for text in stage.of(kind)]:
            assert isinstance(json.loads(text), list)
    [entry] = [text for stage in lineage(image) for text in stage.of("ENTRYPOINT")]
    assert json.loads(entry)[0] == "python"


@pytest.mark.parametrize("image", IMAGES)
def test_the_health_check_is_our_own_command_with_time_to_load(image: str) -> None:
    [check] = [text for stage in lineage(image) for text in stage.of("HEALTHCHECK")]
    flags, _, command = check.partition("CMD ")
    assert json.loads(command)[:2] == ["pdserve", "health"]
    assert int(re.findall(r"--start-period=(\d+)m", flags)[0]) >= 10
    assert int(re.findall(r"--retries=(\d+)", flags)[0]) <= 5


def test_ports_are_those_that_the_image_sets_and_no_others() -> None:
    worker = environment()
    set_ports = {value for name, value in worker.items() if name.endswith("_PORT")}
    exposed = {port for stage in lineage("cpu") for text in stage.of("EXPOSE") for port in text.split()}
    assert exposed == set_ports == {"9100", "50051", "50052"}
    assert worker["UCX_TCP_PORT_RANGE"] == "19600-19619"
    assert stages()["router"].of("EXPOSE") == ["8000 8001"]


def test_what_an_unknown_user_has_no_home_for_is_writable_for_group_0() -> None:
    variables = environment()
    writable = "/var/cache/pdserve"
    assert variables["HOME"] == variables["XDG_CACHE_HOME"] == writable
    assert variables["TRITON_CACHE_DIR"].startswith(writable)
    # Without a name, getpass.getuser() fails for a user id that /etc/passwd does not have.
    assert variables["USER"]
    [setup] = stages()["runtime"].of("RUN")
    assert f"chmod 2775 /models {writable}" in setup


def test_the_image_for_rdma_is_that_for_gpus_with_a_ucx_that_has_verbs() -> None:
    stage, build = stages()["rdma"], stages()["ucx-environment"]
    assert stage.base == "cuda"
    assert stage.of("COPY") == ["--from=ucx-environment /opt/ucx /opt/ucx"]
    assert stage.of("USER")[-1] == "1000:0"
    variables = environment("rdma")
    assert variables["LD_LIBRARY_PATH"] == "/opt/ucx/lib"
    component = (ROOT / "k8s" / "components" / "rdma" / "worker.yaml").read_text(encoding="utf-8")
    assert f'value: "{variables["RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"]}"' in component
    [version] = [text.partition("=")[2] for text in build.of("ARG") if text.startswith("UCX=")]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"libucx-cu13=={version}\n" in pinned
    [made] = [text for text in build.of("RUN") if "configure-release" in text]
    assert "--prefix=/opt/ucx " in made
    assert "--with-verbs" in made


def test_compose_builds_on_the_same_base_image() -> None:
    services = load(BASE)["services"]
    for name, target in {"secrets": "router", "model": "cpu"}.items():
        build = services[name]["build"]
        assert build["target"] == target
        assert build["args"]["BASE_IMAGE"] == arguments()["BASE_IMAGE"]


def test_the_image_for_gpus_has_either_cuda() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    [version] = [text.partition("=")[2] for text in stages()["requirements"].of("ARG")]
    assert f"cuda{version}" in extras
    [made] = [text for text in stages()["requirements"].of("RUN") if "requirements.py" in text]
    assert 'requirements.py otel "cuda${CUDA}"' in made
    given = load(GPU)["services"]["model"]["build"]["args"]
    assert (str(given["CUDA"]), given["CUDA_TORCH_INDEX"]) == (version, None)
    declared = stages()["requirements"].of("ARG") + stages()["cuda-environment"].of("ARG")
    assert {text.partition("=")[0] for text in declared} == given.keys()


def test_the_largest_images_come_last_for_builders_that_make_every_stage() -> None:
    order = list(stages())
    names = ("router", "cpu", "cuda-environment", "cuda", "ucx-environment", "rdma")
    assert sorted(names, key=order.index) == list(names)


def test_the_build_gets_what_it_copies() -> None:
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    sources = [
        source
        for stage in stages().values()
        for text in stage.of("COPY")
        if not text.startswith("--from")
        for source in text.split()[:-1]
    ]
    assert set(sources) - {"."} <= set(allowed)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert packages <= set(allowed)


def test_the_sbom_is_made_by_the_build() -> None:
    for image in IMAGES:
        [made] = [text for text in stages()[f"{image}-environment"].of("RUN") if "cyclonedx-py" in text]
        assert "--output-file /opt/pdserve/sbom.cdx.json" in made

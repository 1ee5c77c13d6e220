"""Several models in the commands: their workers, memory and names, and what an operator sees and moves."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from decode_svc.config import DecodeConfig
from pdserve.base.config import add_options, from_arguments
from pdserve.base.errors import RequestError, SetupError
from pdserve.cli.cluster_plan import ClusterPlan, PreparedModel, RedisPlan, RunEnvironment, make_plan
from pdserve.cli.drain import require_another
from pdserve.cli.placement import Hardware
from pdserve.cli.rebalance import sequences_too_many
from pdserve.cli.role import require_decode_worker
from pdserve.cli.services import router_spec, worker_specs
from pdserve.cli.status import ClusterStatus, WorkerStatus, render
from pdserve.cli.supervisor.spec import ProcessSpec
from pdserve.cli.up import _labels
from pdserve.cli.up_config import UpConfig
from pdserve.observe.machine import Cores
from router_svc.config import RouterConfig

GIB = 1 << 30
MODELS = [
    PreparedModel(path=Path("/models/a"), served_name="a", weight_bytes=GIB),
    PreparedModel(path=Path("/models/b"), served_name="org/b", weight_bytes=2 * GIB),
]
RUN = RunEnvironment(
    hardware=Hardware(cores=Cores(ids=tuple(range(8)), usable=8), num_gpus=4, free_memory_bytes=20 * GIB),
    hostname="host",
    run_dir=Path("/run"),
    log_dir=Path("/logs"),
    variables={},
)
#: A prefill worker may change its role, and so takes the settings of decode workers.
CONFIGS: dict[str, type[Any]] = {"prefill": DecodeConfig, "decode": DecodeConfig}
REDIS = RedisPlan(url="redis://127.0.0.1:1", spec=None)


def plan(**settings: Any) -> ClusterPlan:
    return make_plan(UpConfig(model=("a", "b"), **settings), MODELS, REDIS, RUN)


def parsed(spec: ProcessSpec, cls: type[Any], service: str) -> Any:
    parser = argparse.ArgumentParser()
    add_options(parser, cls)
    return from_arguments(cls, service, parser.parse_args(spec.argv[spec.argv.index("-m") + 2 :]), spec.environment)


def test_each_model_has_its_workers_and_the_router_has_all_models() -> None:
    made = plan(decode=2, alias=("gpt-4o=org/b",))
    specs = worker_specs(made)
    configs = [parsed(spec, CONFIGS[spec.name.partition("-")[0]], spec.name.partition("-")[0]) for spec in specs]
    workers = [(config.worker_id.removeprefix(made.id_prefix), config.model_name) for config in configs]
    of_prefill = [("prefill-0", "a"), ("prefill-1", "org/b")]
    of_decode = [("decode-0", "a"), ("decode-1", "a"), ("decode-2", "org/b"), ("decode-3", "org/b")]
    assert workers == of_prefill + of_decode
    assert _labels(made)[-1] == "decode-3 (org/b)"
    config = parsed(router_spec(made), RouterConfig, "router_svc")
    assert config.models == {"a": Path("/models/a"), "org/b": Path("/models/b")}
    assert config.aliases == {"gpt-4o": "org/b"}
    assert config.prefill_expected == 1


def test_cores_and_memory_are_divided_among_the_workers_of_all_models() -> None:
    made = plan()
    cpus = [cpu for share in made.shares for cpu in share.cpus]
    assert (len(made.shares), sorted(cpus)) == (4, list(range(8)))
    # A fifth of the 14 GiB that two copies of both models leave, for four workers.
    assert made.kv_cache_bytes == pytest.approx(0.7 * GIB, rel=0.01)
    gpus = plan(device="cuda").gpus
    assert [gpu.device for gpu in gpus] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_models_that_do_not_fit_together_are_refused_with_the_weights_of_each() -> None:
    heavy = [replace(MODELS[0], weight_bytes=4 * GIB), replace(MODELS[1], weight_bytes=7 * GIB)]
    with pytest.raises(
        SetupError,
        match=r"The workers \(4\) need 22\.0 GiB .* each has about 4\.0 GiB or 7\.0 GiB of weights .* "
        r"--prefill 0 needs 11\.0 GiB",
    ):
        make_plan(UpConfig(model=("a", "b")), heavy, REDIS, RUN)


@pytest.mark.parametrize(
    ("settings", "needle"),
    [
        ({"served_model_name": ("x",)}, "There are 2 models, but --served-model-name is given 1 times"),
        ({"served_model_name": ("x", "x")}, "Two models have the name 'x'"),
        ({"alias": ("gpt-4o=b",)}, "there is no model 'b'. The models are: a, org/b"),
    ],
)
def test_names_that_do_not_fit_end_the_start(settings: dict[str, Any], needle: str) -> None:
    with pytest.raises(SetupError, match=needle):
        plan(**settings)


def test_models_are_arguments_one_after_the_other() -> None:
    def load(*argv: str) -> UpConfig:
        parser = argparse.ArgumentParser()
        add_options(parser, UpConfig)
        return from_arguments(UpConfig, "up", parser.parse_args(argv), {})

    assert load("a", "/my models/b", "--decode", "2").model == ("a", "/my models/b")
    assert load("--decode", "2").model == UpConfig().model == ("smollm2-135m-instruct",)


def worker(name: str, model: str, **changes: Any) -> WorkerStatus:
    fields = {
        "worker_id": name,
        "tier": name.partition("-")[0],
        "model": model,
        "ready": True,
        "epoch": 1,
        "grpc_address": "127.0.0.1:1",
        "http_address": "127.0.0.1:2",
        "max_num_seqs": 8,
        "total_blocks": 100,
        "free_blocks": 100,
        "running": 0,
        "waiting": 0,
        "queued_tokens": 0,
    }
    return WorkerStatus.model_validate(fields | changes)


def test_requests_move_between_workers_of_their_model_only() -> None:
    """Model b has more requests than a, and no second worker that could take them."""
    counts = (("decode-0", "a", 1), ("decode-1", "a", 5), ("decode-2", "b", 9))
    assert sequences_too_many([worker(name, model, running=running) for name, model, running in counts]) == {
        "decode-1": 2
    }


def test_the_last_worker_of_a_model_is_neither_drained_nor_given_another_role() -> None:
    workers = [worker("decode-0", "a"), worker("decode-1", "a"), worker("decode-2", "b")]
    require_another(workers, workers[0])
    require_decode_worker(workers, workers[0], "prefill")
    with pytest.raises(RequestError, match="decode-2 is the last ready decode worker"):
        require_another(workers, workers[2])
    with pytest.raises(RequestError, match="decode-2 is the last ready decode worker"):
        require_decode_worker(workers, workers[2], "prefill")


def test_the_status_shows_each_workers_model_and_models_without_workers() -> None:
    models = [{"model": "a", "model_revision": "c0ffee"}, {"model": "org/b"}]
    router = {"status": "ready", "model": "a", "models": models}
    workers = [worker("prefill-0", "a"), worker("decode-0", "a"), worker("prefill-1", "org/b")]
    status = ClusterStatus.model_validate({"router": router, "redis": {"available": True}, "workers": workers})
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        console.print(render(status, "http://r", width=120))
    lines = [line.split() for line in captured.get().splitlines()]
    assert "a@c0ffee, org/b" in captured.get()
    assert ["prefill-1", "org/b", "prefill", "ready"] in [line[:4] for line in lines]
    assert ["-", "org/b", "decode", "no", "worker"] in lines
    assert ["-", "a", "decode", "no", "worker"] not in lines

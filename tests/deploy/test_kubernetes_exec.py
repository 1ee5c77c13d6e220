"""Commands in a router's container, as by `kubectl exec`: they know the router, and what workers ask for."""

from __future__ import annotations

import dataclasses
import re
import tomllib

from pdserve.cli.doctor import DoctorConfig
from pdserve.cli.drain import DrainConfig
from pdserve.cli.rebalance import RebalanceConfig
from pdserve.cli.role import RoleConfig
from router_svc.config import RouterConfig
from tests.deploy.manifests import environment, of_kind, services
from tests.deploy.render import ROOT

#: Commands that connect to workers, as those do that are given the cluster's secret.
WORKER_COMMANDS = {"DOCTOR": DoctorConfig, "DRAIN": DrainConfig, "REBALANCE": RebalanceConfig, "ROLE": RoleConfig}


def test_commands_in_a_routers_container_know_the_admin_port_and_what_workers_ask_for() -> None:
    [router] = [each for each in services("base") if isinstance(each.config, RouterConfig)]
    [text] = [each["data"]["commands.toml"] for each in of_kind("base", "ConfigMap") if "commands.toml" in each["data"]]
    settings = {key.replace("-", "_"): value for key, value in tomllib.loads(text).items()}
    variables = environment("base", router.container)
    admin = f"http://127.0.0.1:{router.config.admin_port}"
    for command, config in WORKER_COMMANDS.items():
        known = {field.name for field in dataclasses.fields(config)}
        needed = {name for name in known if name.startswith("peer_ssl_")} | {"base_url", "cluster_secret_file"}
        assert needed <= settings.keys() <= known
        assert variables[f"PDSERVE_{command}__CONFIG"] == "/etc/pdserve/commands.toml"
    assert settings.pop("base_url") == admin
    assert settings == {name: getattr(router.config, name) for name in settings}
    assert {variables[f"PDSERVE_{command}__BASE_URL"] for command in ("STATUS", "TRACE")} == {admin}


def test_every_command_that_takes_the_cluster_secret_is_set_up_in_a_routers_container() -> None:
    settings = re.compile(r"^class \w+\(WorkerCallOptions\):", re.MULTILINE)
    paths = [path for path in (ROOT / "pdserve/cli").rglob("*.py") if settings.search(path.read_text(encoding="utf-8"))]
    modules = {str(path.relative_to(ROOT).with_suffix("")).replace("/", ".") for path in paths}
    assert {name.removesuffix(".__init__") for name in modules} == {
        each.__module__ for each in WORKER_COMMANDS.values()
    }

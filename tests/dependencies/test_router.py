"""Routers, and the commands that their image is for, start with the packages that are in it: those of no extra."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import packages_distributions

from packaging.utils import canonicalize_name

from tests.dependencies.pins import installations

#: Imports every module of the router and these commands where the modules argv[1:] are not installed.
PROGRAM = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

absent = set(sys.argv[1:])
sys.meta_path.insert(0, Absent())
import router_svc
for module in pkgutil.walk_packages(router_svc.__path__, "router_svc."):
    importlib.import_module(module.name)
for command in ("chat", "drain", "health", "key", "rebalance", "role", "secrets", "status", "trace"):
    importlib.import_module(f"pdserve.cli.{command}")
print("router_svc.service" in sys.modules)
"""


def test_the_router_needs_no_package_of_a_worker() -> None:
    image = {name for name, needed_by in installations().items() if needed_by in ("router", "traces")} | {"pdserve"}
    absent = [
        module
        for module, owners in packages_distributions().items()
        if not image.intersection(map(canonicalize_name, owners))
    ]
    assert {"numpy", "torch"} <= set(absent)
    done = subprocess.run([sys.executable, "-c", PROGRAM, *absent], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("True", "")

"""Nothing that arrives becomes code: no unpickling, no evaluation, no module of a model, no shell.

Peers were broken this way again and again: pickle on sockets (CVE-2025-32444, CVE-2025-29783, CVE-2025-47277,
CVE-2026-3059, CVE-2026-3060, CVE-2026-7301, CVE-2026-7302, CVE-2026-7304), in requests (CVE-2025-10164, CVE-2025-62164,
CVE-2026-3989), in weights (CVE-2025-24357), the Python files of a model (CVE-2026-22807) and `eval` of what a model
said (CVE-2025-9141).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pdserve", "router_svc", "worker_svc", "prefill_svc", "decode_svc", "kvtransfer", "kernels")
#: Modules whose loaders run what they load. `multiprocessing` unpickles what comes through its queues and pipes.
MODULES = (
    "cloudpickle",
    "dill",
    "jsonpickle",
    "joblib",
    "marshal",
    "multiprocessing",
    "pickle",
    "runpy",
    "shelve",
    "tarfile",
    "transformers",
    "xmlrpc",
    "yaml",
    "zmq",
)
#: Functions that run or unpickle an argument.
CALLS = frozenset(
    {
        "__import__",
        "compile",
        "eval",
        "exec",
        "np.load",
        "numpy.load",
        "os.popen",
        "os.system",
        "torch.hub.load",
        "torch.load",
        "torch.save",
    }
)
#: Methods that do so whatever they belong to.
METHODS = frozenset(
    {
        "all_gather_object",
        "broadcast_object_list",
        "extractall",
        "gather_object",
        "load_state_dict_from_url",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    }
)
#: Arguments that allow what is off by default.
ARGUMENTS = {"allow_pickle": True, "shell": True, "trust_remote_code": True, "weights_only": False}
#: Text without any of these need not be parsed.
_WORDS = (*MODULES, *(f"{name}(" for name in CALLS), *METHODS, *ARGUMENTS)


def _found(source: str) -> Iterator[str]:
    """What runs data as code."""
    if not any(word in source for word in _WORDS):
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names if each.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield module
            case ast.Call(func=function, keywords=keywords):
                called = ast.unparse(function)
                if called.removeprefix("builtins.") in CALLS or called.rpartition(".")[2] in METHODS:
                    yield called
                yield from (
                    f"{called}({each.arg}=...)"
                    for each in keywords
                    if each.arg in ARGUMENTS
                    and not (isinstance(each.value, ast.Constant) and each.value.value is not ARGUMENTS[each.arg])
                )


def test_nothing_that_arrives_is_run_or_unpickled() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in _found(path.read_text(encoding="utf-8"))
    }
    assert found == set()


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.connection as c",
        "from transformers import AutoConfig",
        "import zmq.asyncio",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "builtins.exec(text)",
        "dist.broadcast_object_list(values)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=flag)",
        "AutoModel.from_pretrained(name, trust_remote_code=config.trust)",
        "archive.extractall(path)",
    ],
)
def test_the_check_sees_it(source: str) -> None:
    assert [*_found(source)] != []


def test_the_check_leaves_harmless_code_alone() -> None:
    for source in (
        "re.compile('a')",
        "json.load(file)",
        "subprocess.run(['ls'], shell=False)",
        "model.eval()",
        "platform.system()",
    ):
        assert [*_found(source)] == []

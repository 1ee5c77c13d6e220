"""Makes the product's sources of time and chance those of the simulation, for the rest of this process's life."""

from __future__ import annotations

import gc
import inspect
import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from tests.simulation.loop import SimulatedLoop, current_process, stable_hash

#: Unix time at which each simulation starts.
START = 1_800_000_000.0
_PACKAGES = ("pdserve", "router_svc", "worker_svc", "prefill_svc", "decode_svc", "kvtransfer")


def take_over(loop: SimulatedLoop, chance: random.Random) -> None:
    """To be called once, after all modules of the product are imported and before any of its objects exists."""
    gc.disable()  # When it runs depends on addresses, and it would run `finally` blocks of the dead.

    def monotonic() -> float:
        return loop.time()

    def wall_clock() -> float:
        process = current_process()
        return START + loop.time() + (0.0 if process is None else process.clock_offset_s)

    clocks: dict[Any, Callable[[], float]] = {
        time.monotonic: monotonic,
        time.perf_counter: monotonic,
        time.time: wall_clock,
    }
    _replace_in_modules(clocks)
    time.monotonic, time.perf_counter, time.time = monotonic, monotonic, wall_clock
    time.process_time_of_simulation = time.process_time  # type: ignore[attr-defined]
    secrets.token_bytes = lambda nbytes=32: chance.randbytes(nbytes or 32)  # type: ignore[assignment]
    secrets.token_hex = lambda nbytes=32: chance.randbytes(nbytes or 32).hex()  # type: ignore[assignment]
    secrets.randbits = chance.getrandbits  # type: ignore[assignment]
    uuid.uuid4 = lambda: uuid.UUID(int=chance.getrandbits(128), version=4)
    os.urandom = chance.randbytes  # type: ignore[assignment]
    random.seed(chance.getrandbits(64))
    if hasattr(os, "eventfd"):
        del os.eventfd
    from pdserve.net.streams import MessageStream

    MessageStream.__hash__ = stable_hash  # type: ignore[assignment, method-assign]


def _replace_in_modules(clocks: dict[Any, Callable[[], float]]) -> None:
    """Replaces clocks that modules have imported by name, and those that are defaults of parameters."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _PACKAGES:
            continue
        for key, value in list(vars(module).items()):
            if inspect.isbuiltin(value) and value in clocks:
                setattr(module, key, clocks[value])
            elif inspect.isclass(value) and value.__module__ == name:
                for member in list(vars(value).values()):  # Looking at some adds to the class.
                    _replace_defaults(member, clocks)
            elif inspect.isfunction(value):
                _replace_defaults(value, clocks)


def _replace_defaults(function: Any, clocks: dict[Any, Callable[[], float]]) -> None:
    defaults = getattr(function, "__kwdefaults__", None) or {}
    for key, value in defaults.items():
        if inspect.isbuiltin(value) and value in clocks:
            defaults[key] = clocks[value]

"""`python -m tests.property.model.restless_owners FILE CPU...`: owners of cores that become busy and idle all the time.

Runs as a separate process, like real owners of lent cores; it ends with its parent process or by a signal.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from pdserve.worker.load.core_leases import CoreLeases

#: Iterations of an empty loop between two changes, from less than a microsecond to longer than a layer takes.
_PAUSES = (0, 10, 100, 1000, 10_000)


def main(path: Path, cpus: list[int]) -> None:
    """Changes leases until the parent process has ended."""
    generator, parent = random.Random(0), os.getppid()
    owners = [CoreLeases(path, [cpu]) for cpu in cpus]
    print("ready", flush=True)
    while os.getppid() == parent:
        for _ in range(100):
            generator.choice(owners).set_busy(generator.random() < 0.5)
            for _ in range(generator.choice(_PAUSES)):
                pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(cpu) for cpu in sys.argv[2:]])

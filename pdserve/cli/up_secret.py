"""The cluster secret of one run of `pdserve up`, and how `pdserve doctor` of the same user finds it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from pdserve.cli.run_dir import private_directories
from pdserve.cli.up_config import UpConfig
from pdserve.peers.secret import SECRET_VARIABLE, ClusterSecret, new_secret, parse_secret, read_secret

_FILE = "cluster-secret-{}"
_LOCAL = ("127.0.0.1", "localhost", "::1")


def own_secret(config: UpConfig, run_dir: Path) -> dict[str, str]:
    """A new secret as a variable of all processes, which other users of the machine cannot read.

    It is also in a file of `run_dir`. Empty when the user has one, or when workers of other machines may join over the
    user's Redis. Raises: SetupError when the user's secret cannot be used.
    """
    if read_secret(config.cluster_secret_file) is not None or config.redis_url is not None:
        return {}
    secret = new_secret()
    file = run_dir / _FILE.format(config.port)
    file.touch(mode=0o600)
    file.write_text(secret, encoding="utf-8")
    return {SECRET_VARIABLE: secret}


def secret_of_run(base_url: str) -> ClusterSecret | None:
    """The secret of this user's `pdserve up` on this machine whose router listens at `base_url`; None without one."""
    url = urlsplit(base_url)
    if url.hostname not in _LOCAL or url.port is None:
        return None
    for directory in private_directories():
        file = directory / _FILE.format(url.port)
        try:
            return parse_secret(file.read_text(encoding="utf-8"), where=str(file))
        except OSError:
            continue  # Of another run, or of another user.
    return None

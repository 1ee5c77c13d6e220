"""The cluster secret of one run of `pdserve up`."""

from __future__ import annotations

from pdserve.base.secret import SECRET_VARIABLE, new_secret, read_secret
from pdserve.cli.up_config import UpConfig


def own_secret(config: UpConfig) -> dict[str, str]:
    """A new secret as a variable of all processes, which other users of the machine cannot read.

    Empty when the user has one, or when workers of other machines may join over the user's Redis.
    Raises: SetupError when the user's secret cannot be used.
    """
    if read_secret(config.cluster_secret_file) is not None or config.redis_url is not None:
        return {}
    return {SECRET_VARIABLE: new_secret()}

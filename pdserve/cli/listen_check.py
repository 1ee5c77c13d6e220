"""Checks that the router's ports are free before anything starts."""

from __future__ import annotations

import socket

from pdserve.base.errors import SetupError
from pdserve.cli.up_config import UpConfig


def require_free_ports(config: UpConfig) -> None:
    """Reports a taken port at once instead of after the model was loaded. Raises `SetupError`."""
    ports = {"--port": config.port, "--grpc-port": config.effective_grpc_port, "--admin-port": config.admin_port}
    for flag, port in ports.items():
        if port is None:
            continue
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((config.host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise SetupError(
                f"Cannot listen on {config.host}:{port}: {reason}. Choose another with {flag} or --host."
            ) from error

"""Settings that stand in several settings classes, each with one definition."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from pdserve.base.config import option
from pdserve.base.logs import FORMATS, LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """What routers and workers have in common: how they end, know their peers, and report."""

    drain_timeout_s: float = option(45.0, help="seconds that running requests have to finish after SIGTERM", minimum=0)
    cluster_secret_file: str | None = option(
        None,
        help="file with the secret that routers and workers share; default: PDSERVE_CLUSTER_SECRET, else an open "
        "cluster",
        metavar="FILE",
    )
    peer_ssl_certfile: str | None = option(
        None,
        help="TLS between routers and workers: this process's certificate, with those below its CA",
        metavar="FILE",
    )
    peer_ssl_keyfile: str | None = option(None, help="the certificate's private key", metavar="FILE")
    peer_ssl_ca_certs: str | None = option(
        None, help="certificates of the CAs that routers and workers have theirs from", metavar="FILE"
    )
    peer_ssl_server_name: str | None = option(
        None, help="name in the certificates of all workers; default: the address of each", metavar="NAME"
    )
    log_level: str = option("info", help="lowest level of log messages", choices=LEVELS)
    log_format: str = option("text", help="form of log lines: text, or one JSON object per line", choices=FORMATS)
    audit_log: str | None = option(
        None, help="file for the audit log: admin actions and refusals; default: in the log", metavar="FILE"
    )
    otlp_endpoint: str | None = option(
        None, help="base URL of an OpenTelemetry collector (OTLP over HTTP); without one no traces", metavar="URL"
    )


def same_option(cls: type[Any], name: str) -> Any:
    """The field of another settings class again, with its default and its help."""
    found = next(field for field in dataclasses.fields(cls) if field.name == name)
    return dataclasses.field(default=found.default, metadata=found.metadata)

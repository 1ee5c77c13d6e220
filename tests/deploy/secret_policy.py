"""What each workload has to be protected by, and what one runs without: everything comes from a Secret."""

from __future__ import annotations

from pathlib import PurePosixPath
from urllib.parse import parse_qs, urlsplit

from router_svc.config import RouterConfig
from tests.deploy.manifests import Object, Service, Workload, secret_value, services_of

PEER_NAME = "pdserve-peer"
#: Where Redis and its clients have the password, in every render but that with the user's own Redis.
PASSWORD_FILE = "/run/secrets/pdserve/redis-password"
PASSWORD = ("pdserve-secrets", "redis-password")
OWN_REDIS = secret_value("pdserve-redis", "url")


def faults(workload: Workload) -> list[str]:
    """What a workload runs without, although it may not."""
    found = [f"{service.title}: {fault}" for service in services_of(workload) for fault in _faults(service)]
    for container in workload.containers:
        if "redis-server" in " ".join(map(str, container.get("command", ()))) or "redis" in container["image"]:
            found += [f"{workload.title}: {fault}" for fault in _redis_faults(workload, container)]
    return found


def _faults(service: Service) -> list[str]:
    config = service.config
    needed = {"cluster secret": [config.cluster_secret_file]}
    needed["TLS between peers"] = [config.peer_ssl_certfile, config.peer_ssl_keyfile, config.peer_ssl_ca_certs]
    if isinstance(config, RouterConfig):
        needed["API keys"] = [config.api_keys_file]
    found = [
        f"no {what}"
        for what, paths in needed.items()
        if not all(secret_of(service.workload, service.container, path) is not None for path in paths)
    ]
    if config.peer_ssl_server_name != PEER_NAME:
        found.append("no name of peers")
    if isinstance(config, RouterConfig) and config.admin_port in (None, config.port):
        found.append("no admin port")
    url = urlsplit(config.redis_url)
    [path] = parse_qs(url.query).get("password_file", [None])
    if url.password != OWN_REDIS and secret_of(service.workload, service.container, path) != PASSWORD:
        found.append("Redis without a password")
    return found


def _redis_faults(workload: Workload, container: Object) -> list[str]:
    script = " ".join(container.get("command", ()))
    takes_it = f"\nrequirepass $(cat {PASSWORD_FILE})\n" in script
    return (
        [] if takes_it and secret_of(workload, container, PASSWORD_FILE) == PASSWORD else ["Redis without a password"]
    )


def secret_of(workload: Workload, container: Object, path: str | None) -> tuple[str, str] | None:
    """The Secret that a file of a container comes from, and the key; None: from none."""
    if path is None:
        return None
    directory, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
    for mount in container["volumeMounts"]:
        if mount["mountPath"] == directory and mount.get("readOnly"):
            [volume] = [each for each in workload.spec["volumes"] if each["name"] == mount["name"]]
            for item in volume.get("secret", {}).get("items", ()):
                if item["path"] == name:
                    return volume["secret"]["secretName"], item["key"]
    return None

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
#: The same for the store of responses.
STATE_PASSWORD_FILE = "/run/secrets/pdserve-state/state-password"
STATE_PASSWORD = ("pdserve-secrets-state", "state-password")
OWN_STATE = secret_value("pdserve-state", "url")


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
    if not _has_password(service, config.redis_url, PASSWORD, OWN_REDIS):
        found.append("Redis without a password")
    if isinstance(config, RouterConfig) and not _has_password(service, config.state_url, STATE_PASSWORD, OWN_STATE):
        found.append("no store of responses with a password")
    return found


def _has_password(service: Service, address: str | None, password: tuple[str, str], own: str) -> bool:
    """Whether a URL has this key of a Secret as its password, or is `own`, that of the user's Redis."""
    url = urlsplit(address or "")
    [path] = parse_qs(url.query).get("password_file", [None])
    return url.password == own or secret_of(service.workload, service.container, path) == password


def _redis_faults(workload: Workload, container: Object) -> list[str]:
    script = " ".join(container.get("command", ()))
    is_state = workload.component == "state"
    file, password = (STATE_PASSWORD_FILE, STATE_PASSWORD) if is_state else (PASSWORD_FILE, PASSWORD)
    takes_it = f"\nrequirepass $(cat {file})\n" in script
    return [] if takes_it and secret_of(workload, container, file) == password else ["Redis without a password"]


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

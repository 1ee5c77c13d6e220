"""A Kubernetes Secret, made through the API server by a pod with its service account. One that exists stays as it is.

The Job of `k8s/base/front/secrets.yaml` runs it. It needs the right to create Secrets, and to read the one.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from pdserve.base.config import variable
from pdserve.base.errors import PdserveError, SetupError

#: Where Kubernetes mounts a pod's token, namespace, and the authority of the API server.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 15.0
_ATTEMPTS, _PAUSE_S = 5, 2.0
_ANSWERS = (http.client.OK, http.client.CREATED, http.client.CONFLICT, http.client.NOT_FOUND)
_LABELS = {"app.kubernetes.io/name": "pdserve", "app.kubernetes.io/part-of": "pdserve"}


class _Secret(BaseModel):
    """The part of a Secret that is read."""

    #: Each value in base64.
    data: dict[str, str] = {}


class _Status(BaseModel):
    """How the API server answers what it refuses."""

    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """The API server, as a pod sees it."""

    host: str
    port: int
    namespace: str
    account: Path
    context: ssl.SSLContext
    pause_s: float = _PAUSE_S

    def create_secret(self, name: str, files: Mapping[str, bytes], show: Callable[[], None]) -> bool:
        """Makes the Secret with these contents by key; False if it exists, with all of these keys.

        `show` is called before the contents are sent, and not when the Secret is there: whatever interrupts this, an
        API key in the Secret has been shown.

        Raises:
            SetupError: the API server refuses, or the Secret that exists lacks keys, for which pods would wait forever.
            PdserveError: the API server does not answer.
        """
        data = {key: base64.b64encode(content).decode() for key, content in files.items()}
        stored = self._found(name)
        if stored is None:
            show()
            stored = self._posted_or_found(name, data)
        missing = sorted(data.keys() - stored.data.keys())
        if missing:
            raise SetupError(
                f"The Secret {name} in the namespace {self.namespace} exists, but has no {', '.join(missing)}. "
                "Add what is missing, or delete the Secret to have a new one made."
            )
        # The answer to an earlier attempt may have been lost, so the contents say whose Secret it is.
        return stored.data == data

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/secrets"

    def _found(self, name: str) -> _Secret | None:
        status, body = self._ask("GET", f"{self._path}/{name}")
        if status == http.client.NOT_FOUND:
            return None
        try:
            return _Secret.model_validate_json(body)
        except ValidationError as error:
            raise PdserveError(
                f"{self.host}:{self.port}{self._path}/{name} does not answer like Kubernetes."
            ) from error

    def _posted_or_found(self, name: str, data: dict[str, str]) -> _Secret:
        metadata = {"name": name, "labels": _LABELS}
        secret = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}
        status, body = self._ask("POST", self._path, json.dumps(secret).encode())
        if status == http.client.CREATED:
            return _Secret(data=data)
        stored = self._found(name) if status == http.client.CONFLICT else None
        if stored is None:
            raise PdserveError(
                f"Kubernetes did not make the Secret {name}: {status}: {_message(body)}. Run this again."
            )
        return stored

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body; asks again while the server does not answer or is overloaded. 404 and 409 are answers."""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(self.pause_s)
            try:
                status, answer = self._ask_once(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                reason = f"{error or type(error).__name__}"
                continue
            if status in _ANSWERS:
                return status, answer
            reason = f"{status}: {_message(answer)}"
            if status != http.client.TOO_MANY_REQUESTS and status < http.client.INTERNAL_SERVER_ERROR:
                raise SetupError(
                    f"Kubernetes refuses {method} {path}: {reason}. The Role pdserve-secrets of k8s/base allows it."
                )
        raise PdserveError(f"Kubernetes at {self.host}:{self.port} does not answer {method} {path}: {reason}.")

    def _ask_once(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection(self.host, self.port, timeout=_TIMEOUT_S, context=self.context)
        # Kubernetes replaces the token's file before the token expires.
        token = (self.account / "token").read_text(encoding="utf-8").strip()
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        try:
            connection.request(method, path, body, headers | {"Content-Type": "application/json"} if body else headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def api_server(account: Path = SERVICE_ACCOUNT) -> ApiServer:
    """The API server of the cluster that this pod runs in. Raises `SetupError` outside of a pod."""
    host, port = variable("KUBERNETES_SERVICE_HOST"), variable("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise SetupError("--kubernetes-secret works in a pod of Kubernetes. Elsewhere, write files with --to DIR.")
    try:
        namespace = (account / "namespace").read_text(encoding="utf-8").strip()
        (account / "token").read_bytes()
        context = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except (OSError, ssl.SSLError) as error:
        raise SetupError(
            f"Cannot read the service account in {account}: {error}. Set automountServiceAccountToken in the pod."
        ) from error
    return ApiServer(host=host, port=int(port), namespace=namespace, account=account, context=context)


def _message(body: bytes) -> str:
    try:
        return _Status.model_validate_json(body).message[:300] or "no explanation"
    except ValidationError:
        return "no explanation"

"""Decides who a caller is. Owns the table of keys, and reads the file of keys again when it changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from pdserve.base.api_key import KEY_VARIABLE
from pdserve.base.config import variable
from pdserve.base.errors import Forbidden, SetupError, Unauthorized
from pdserve.base.logs import get_logger
from pdserve.net.hosts import parse_names
from router_svc.clients.keys import ApiKey, KeyTable, flag_keys, parse_keys
from router_svc.config import RouterConfig
from router_svc.request.client import Client

log = get_logger(__name__)

#: Interval at which the file is looked at.
_POLL_S = 1.0
#: Keys are short. A header of this length is none.
_MAX_KEY_CHARACTERS = 1024
_MAX_FILE_BYTES = 16 * 1024**2


class Access:
    """The keys of a router. Without any setting for keys, everybody may do everything."""

    def __init__(
        self,
        keys: Sequence[str] = (),
        path: Path | None = None,
        *,
        models: Collection[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`keys` are whole keys, `path` a file of digests. `models`: the names of the router's models.

        Raises `SetupError` for a file that cannot be used.
        """
        self._flag_keys = flag_keys(keys)
        self._path = path
        self._models = models
        self._clock = clock
        self._seen: object = None
        self._table = KeyTable(self._flag_keys)
        #: Whether callers need no key.
        self.is_open = not keys and path is None
        if path is not None:
            self._seen = _identity(path)
            self._table = KeyTable([*self._flag_keys, *_read(path)])

    async def run(self) -> None:
        """Follows the file until cancelled."""
        while self._path is not None:
            await asyncio.sleep(_POLL_S)
            self.refresh()

    def refresh(self) -> None:
        """Reads the file if it has changed. While it cannot be used, the keys before stay valid."""
        if self._path is None or (identity := _identity(self._path)) == self._seen:
            return
        self._seen = identity
        try:
            self._table = KeyTable([*self._flag_keys, *_read(self._path)])
        except SetupError as error:
            log.error("api_keys_not_reloaded", error=error)
        else:
            log.info("api_keys_reloaded", keys=len(self._table))

    def tenants(self) -> Sequence[str]:
        """The tenants that may send requests, in the order of their keys."""
        return self._table.tenants

    def client(self, credentials: Sequence[str], address: str) -> Client:
        """Who presents these keys from this address.

        Raises:
            Unauthorized: there is no key, it is unknown or has expired, or there are two.
            Forbidden: the key's owner may not use any of this router's models.
        """
        if self.is_open:
            return Client(id=address, is_admin=True)
        if not credentials:
            raise Unauthorized("There is no API key. Send one as `Authorization: Bearer KEY` or as `x-api-key: KEY`.")
        if len(set(credentials)) > 1:
            raise Unauthorized("The request has two different API keys. Send one.")
        key = self._table.find(credentials[0]) if len(credentials[0]) <= _MAX_KEY_CHARACTERS else None
        return self._checked(key)

    def client_of_key(self, key_id: str) -> Client:
        """The owner of a key that was presented earlier. Raises as `client`."""
        return Client(id=key_id) if self.is_open else self._checked(self._table.client_of(key_id))

    def _checked(self, key: ApiKey | None) -> Client:
        if key is None:
            raise Unauthorized("The API key is unknown. Send a valid one.")
        if key.expires_at is not None and self._clock() >= key.expires_at:
            raise Unauthorized(f"The API key {key.client.id} has expired. Ask the operator for another.")
        if key.client.models and key.client.models.isdisjoint(self._models):
            names = " or ".join(f"`{name}`" for name in self._models)
            raise Forbidden(f"The API key {key.client.id} may not use the model {names}.", param="model")
        return key.client


def credentials_of(authorization: Sequence[str], x_api_key: Sequence[str]) -> list[str]:
    """The keys in the values of the two headers. A value of another scheme than Bearer is taken for an unknown key."""
    bearers = [
        rest.strip() if scheme.lower() == "bearer" else value
        for value in authorization
        for scheme, _, rest in [value.strip().partition(" ")]
    ]
    return [*bearers, *(value.strip() for value in x_api_key)]


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _read(path: Path) -> list[ApiKey]:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise SetupError(f"The file of API keys {path} is larger than {_MAX_FILE_BYTES} bytes. Divide it.")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SetupError(f"Cannot read the API keys in {path}: {reason}. Check --api-keys-file.") from error
    return parse_keys(text, str(path))


def access_of(config: RouterConfig) -> Access:
    """The access that the settings describe. Raises `SetupError`."""
    shared = parse_names(variable(KEY_VARIABLE) or "")
    path = None if config.api_keys_file is None else Path(config.api_keys_file)
    return Access(config.api_key or shared, path, models=[*config.models])

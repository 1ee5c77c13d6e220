"""The models of a router, and the one that a request is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdserve.base.errors import Forbidden, NotFound, RequestError
from router_svc.api.generations import Endpoint, GenerationFactory
from router_svc.api.ids import Ids
from router_svc.api.served_model import ServedModel
from router_svc.records.metrics import RouterMetrics
from router_svc.request.client import Client
from router_svc.request.gate import Gate
from router_svc.request.requests import Requests
from router_svc.routing.cluster import Cluster

#: Names listed in an error; further ones are counted.
_MAX_NAMES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBackend:
    """Everything behind one model: its texts, its workers, its queue and its requests."""

    model: ServedModel
    cluster: Cluster
    gate: Gate
    requests: Requests
    metrics: RouterMetrics

    @property
    def name(self) -> str:
        """The name under which workers register, and which answers carry."""
        return self.model.name

    @property
    def revision(self) -> str:
        """Commit of the model's repository; empty for a model that is of no hub."""
        return self.cluster.policy.model_revision or ""

    def max_model_len(self) -> int:
        """The longest sequence that every worker of the model can hold."""
        return self.cluster.max_model_len(default=self.model.default_context)

    def factory(self, ids: Ids, endpoint: Endpoint) -> GenerationFactory:
        """Makes what a request to the endpoint asks of this model."""
        return GenerationFactory(model=self.model, max_model_len=self.max_model_len(), ids=ids, endpoint=endpoint)


class Models:
    """The models of a router by their names, in the order of its settings."""

    def __init__(self, backends: Sequence[ModelBackend], aliases: Mapping[str, str] | None = None) -> None:
        """`aliases`: further names that clients use, each with the name of its model."""
        self._backends = {backend.name: backend for backend in backends}
        self._aliases = dict(aliases or {})

    def __iter__(self) -> Iterator[ModelBackend]:
        return iter(self._backends.values())

    def __len__(self) -> int:
        return len(self._backends)

    def __getitem__(self, name: str) -> ModelBackend:
        """The model with this own name, as requests that were accepted have it."""
        return self._backends[name]

    def get(self, name: str) -> ModelBackend | None:
        """The model with this own name; None: there is none."""
        return self._backends.get(name)

    @property
    def first(self) -> ModelBackend:
        """The first model of the settings, which is often the only one."""
        return next(iter(self))

    def max_model_len(self) -> int:
        """The longest sequence of any model."""
        return max(backend.max_model_len() for backend in self)

    def chosen(self, requested: str | None, client: Client) -> ModelBackend:
        """The model that a request of this client is for. None: it names no model.

        Raises:
            NotFound: there is no such model.
            Forbidden: the client may not use it.
            RequestError: the request names no model, and there are several.
        """
        if requested is None:
            if len(self) > 1:
                raise RequestError(f"`model` is missing. {self._known(client)} Name one.", param="model")
            return self.first
        backend = self._backends.get(self._aliases.get(requested, requested))
        if backend is None:
            raise NotFound(f"The model `{requested[:100]}` does not exist. {self._known(client)}", param="model")
        if not _may_use(client, backend):
            raise Forbidden(f"The API key {client.id} may not use the model `{backend.name}`.", param="model")
        return backend

    def has_name(self, name: str) -> bool:
        """Whether it is the name of a model, or an alias."""
        return name in self._backends or name in self._aliases

    def listed(self, client: Client) -> list[tuple[str, ModelBackend]]:
        """All models that the client may use by all their names: own ones first, then aliases."""
        named = [*self._backends.items(), *((alias, self[name]) for alias, name in self._aliases.items())]
        return [(name, backend) for name, backend in named if _may_use(client, backend)]

    def _known(self, client: Client) -> str:
        names = [f"`{name}`" for name, _ in self.listed(client)]
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return f"This server has {', '.join(names[:_MAX_NAMES])}{more}."


def _may_use(client: Client, backend: ModelBackend) -> bool:
    return not client.models or backend.name in client.models

"""`PoolingParams` with vLLM's names, checked by the rules of the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pdserve.base.errors import RequestError
from router_svc.api.parse import validate
from router_svc.api.pooling.schema import EmbeddingBody

#: Embeddings that are compared are whole and have length 1.
_NOT_OF_SCORES = ("dimensions", "normalize", "prompt_name")


@dataclass(kw_only=True)
class PoolingParams:
    """How embeddings are made. None: as the model's files say.

    `use_activation` is vLLM's later name of `normalize`. `pooling`, `prompt_name` and `add_special_tokens` are fields
    of the HTTP API. Raises `ValueError`, naming the field, for a value that no server would accept.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    pooling: Literal["last", "cls", "mean"] | None = None
    prompt_name: str | None = None
    add_special_tokens: bool | None = None

    def __post_init__(self) -> None:
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise ValueError("`normalize` and `use_activation` are names of one parameter, but differ. Set one.")
        try:
            validate(EmbeddingBody, {"model": "", "input": "-", **self.as_fields()})
        except RequestError as error:
            raise ValueError(str(error)) from None

    def as_fields(self) -> dict[str, Any]:
        """The fields of a request."""
        names = ("truncate_prompt_tokens", "dimensions", "pooling", "prompt_name", "add_special_tokens")
        fields = {name: getattr(self, name) for name in names}
        fields["normalize"] = self.use_activation if self.normalize is None else self.normalize
        return {name: value for name, value in fields.items() if value is not None}

    def require_scores(self) -> None:
        """Raises `ValueError` for a parameter that scores do not have."""
        for name in _NOT_OF_SCORES:
            if name in self.as_fields():
                raise ValueError(f"Scores have no parameter {name!r}. Leave it out, or compare what `embed` returns.")

"""How a prompt's hidden states become one vector, as a value that routers send to workers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PoolingKind(StrEnum):
    """The hidden states that make the embedding of a prompt."""

    #: That of the last token.
    LAST = "last"
    #: That of the first token.
    CLS = "cls"
    #: The mean of all.
    MEAN = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """How an embedding is made."""

    kind: PoolingKind = PoolingKind.LAST
    #: The first dimensions that are kept, before the vector is normalized; 0: all.
    dimensions: int = 0
    #: The vector has length 1.
    normalizes: bool = True

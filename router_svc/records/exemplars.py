"""Exemplars: which request a bucket of a histogram last counted. Only OpenMetrics carries them."""

from __future__ import annotations

from pdserve.base.logs import trace_var

#: OpenMetrics allows 128 characters for names and values of an exemplar's labels together.
_MAX_CHARACTERS = 128


def exemplar_labels(request_id: str) -> dict[str, str]:
    """Labels that lead to one request: its trace's id if it is recorded, else its own, as `pdserve trace` takes it.

    Empty for an id that is too long: clients may choose theirs.
    """
    trace = trace_var.get()
    if trace is not None and trace.is_sampled:
        return {"trace_id": trace.trace_id}
    name = "request_id"
    return {name: request_id} if len(name) + len(request_id) <= _MAX_CHARACTERS else {}

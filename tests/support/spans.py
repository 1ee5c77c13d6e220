"""Spans in tests: a tracer that keeps them, trees of them, and a collector for OTLP over HTTP."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pdserve.base.trace_context import TraceContext
from pdserve.observe.tracing.spans import Sampler, SamplingTracer, Span


class KeepingTracer(SamplingTracer):
    """Implements `pdserve.observe.tracing.Tracer` and keeps every span."""

    def __init__(self, *, ratio: float = 1.0, gen_ai: bool = False) -> None:
        super().__init__(Sampler(ratio=ratio))
        self.gen_ai = gen_ai
        self.exported = self.dropped = 0
        self.spans: list[Span] = []

    def emit(self, spans: Sequence[Span]) -> None:
        self.spans.extend(spans)


def tree(spans: Iterable[Span]) -> dict[str, list[str]]:
    """The paths of span names from the root, such as `{"a": ["a/b"]}`, by trace id; sorted."""
    paths: dict[str, list[str]] = defaultdict(list)
    by_id = {span.context.span_id: span for span in spans}
    for span in by_id.values():
        names, above = [span.name], span.parent_id
        while above in by_id:
            names.append(by_id[above].name)
            above = by_id[above].parent_id
        paths[span.context.trace_id].append("/".join(reversed(names)))
    return {trace_id: sorted(found) for trace_id, found in paths.items()}


class Collector:
    """A collector: keeps what it is sent, or answers with `status`."""

    def __init__(self) -> None:
        self.status = 200
        self.requests: list[ExportTraceServiceRequest] = []
        self.arrived = threading.Condition()
        self.url = ""

    def spans(self) -> list[tuple[str, Span]]:
        """Every span that arrived, with the name of its service."""
        found = []
        for request in list(self.requests):
            for resource in request.resource_spans:
                [service] = [
                    attribute.value.string_value
                    for attribute in resource.resource.attributes
                    if attribute.key == "service.name"
                ]
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        parsed = Span(
                            name=span.name,
                            context=TraceContext(span.trace_id.hex(), span.span_id.hex(), True),
                            parent_id=span.parent_span_id.hex() or None,
                            start=span.start_time_unix_nano / 1e9,
                            end=span.end_time_unix_nano / 1e9,
                            attributes={each.key: str(each.value) for each in span.attributes},
                        )
                        found.append((service, parsed))
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port, until the block ends."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with collector.arrived:
                if collector.status == 200:
                    collector.requests.append(ExportTraceServiceRequest.FromString(body))
                collector.arrived.notify_all()
            self.send_response(collector.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

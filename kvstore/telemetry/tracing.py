"""Traces by OpenTelemetry: spans of HTTP requests, of clients' verbs, of blocks that tiers moved.

Off unless `trace.endpoint` names a collector (OTLP over HTTP); needs the extra `otel`. Spans wait
in a bounded queue and are sent by a thread of the library; what finds no place is dropped. A
request that brings a `traceparent` is traced as its caller decided, others by `trace.ratio`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kvstore import __version__
from kvstore.config.settings import TraceSettings
from kvstore.config.units import without_login
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Span

SEND_LIMIT_MS: Final = 3000.0
"""How long the process's end waits for spans to be sent."""
EXPORT_LIMIT_S: Final = 2.0
"""Longest one batch may take, tries and all."""
QUEUE_SPANS: Final = 2048
BATCH_SPANS: Final = 256


class RequestSpan:
    """The span of one HTTP request, while it is served."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.trace_id = f"{span.get_span_context().trace_id:032x}"

    def ends(self, path: str, about: Mapping[str, Any]) -> None:
        """It has been answered. path: its route's template."""
        from opentelemetry.trace import StatusCode

        self._span.update_name(f"{about['method']} {path}")
        self._span.set_attributes({_NAMES.get(name, name): value for name, value in about.items()})
        self._span.set_attribute("http.route", path)
        if about["status"] >= 500:
            self._span.set_status(StatusCode.ERROR)


_NAMES: Final = {
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
}


class Tracer:
    """Makes spans and sends them. `record` is a `meters.Record`, and may be called from any thread.

    service: the name under which they are shown.
    Raises ConfigError: the extra is not installed, or the endpoint is no URL.
    """

    def __init__(self, settings: TraceSettings, service: str) -> None:
        if not settings.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"trace.endpoint = {without_login(settings.endpoint)!r} is no URL; "
                "http://127.0.0.1:4318 is right"
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        except ModuleNotFoundError:
            raise ConfigError(
                "trace.endpoint needs OpenTelemetry; pip install 'kvstore-offload[otel]'"
            ) from None
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.ratio)),
            resource=Resource.create({"service.name": service, "service.version": __version__}),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(
            endpoint=settings.endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_LIMIT_S
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter, max_queue_size=QUEUE_SPANS, max_export_batch_size=BATCH_SPANS
            )
        )
        self._tracer = self._provider.get_tracer("kvstore", __version__)

    def record(self, name: str, seconds: float, about: Mapping[str, Any]) -> None:
        """A span that ends now and took so many seconds."""
        ended_ns = time.time_ns()
        span = self._tracer.start_span(
            name, start_time=ended_ns - int(seconds * 1e9), attributes=dict(about)
        )
        span.end(ended_ns)

    @contextmanager
    def request(self, method: str, headers: Mapping[bytes, bytes]) -> Iterator[RequestSpan]:
        """A span around serving a request; the child of the caller's, where it names one."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        names = ("traceparent", "tracestate")
        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in names
            if name.encode() in headers
        }
        context = TraceContextTextMapPropagator().extract(carrier)
        with self._tracer.start_as_current_span(
            method, context=context, kind=SpanKind.SERVER
        ) as span:
            yield RequestSpan(span)

    def close(self) -> None:
        """Send what waits, for a bounded time."""
        self._provider.force_flush(int(SEND_LIMIT_MS))
        self._provider.shutdown()


def open_tracer(settings: TraceSettings, service: str) -> Tracer | None:
    """A tracer, where the configuration asks for one."""
    return Tracer(settings, service) if settings.endpoint else None

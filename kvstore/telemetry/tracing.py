"""OpenTelemetry traces: spans of HTTP requests, clients' operations and tier transfers.

Traces are off unless `trace.endpoint` names a collector (OTLP over HTTP). They require the extra
`otel`. Spans wait in a bounded queue, and a thread of the library sends them; spans that do not fit
are dropped. A request with a `traceparent` is traced as its caller decided. Other requests are
sampled with `trace.sample_ratio`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kvstore.config.settings import TraceSettings
from kvstore.config.units import without_login
from kvstore.errors import ConfigError
from kvstore.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Span

FLUSH_TIMEOUT_MS: Final = 3000.0
"""Longest wait for unsent spans at the process's end."""
EXPORT_TIMEOUT_S: Final = 2.0
"""Timeout of one batch, retries included."""
QUEUE_SPANS: Final = 2048
BATCH_SPANS: Final = 256


class RequestSpan:
    """The span of one HTTP request in progress."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.trace_id = f"{span.get_span_context().trace_id:032x}"

    def end(self, path: str, attributes: Mapping[str, Any]) -> None:
        """Set the attributes of an answered request. path: its route's template."""
        from opentelemetry.trace import StatusCode

        self._span.update_name(f"{attributes['method']} {path}")
        self._span.set_attributes(
            {_NAMES.get(name, name): value for name, value in attributes.items()}
        )
        self._span.set_attribute("http.route", path)
        if attributes["status"] >= 500:
            self._span.set_status(StatusCode.ERROR)


_NAMES: Final = {
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
}


class Tracer:
    """Creates and sends spans. `record` is a `usage_counters.Record`; call it from any thread.

    service: the name of the service in the traces.
    Raises ConfigError: the extra is not installed, or the endpoint is not a URL.
    """

    def __init__(self, settings: TraceSettings, service: str) -> None:
        if not settings.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"trace.endpoint = {without_login(settings.endpoint)!r} must be an HTTP URL, "
                "such as http://127.0.0.1:4318"
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        except ModuleNotFoundError:
            raise ConfigError(
                "trace.endpoint requires OpenTelemetry: pip install 'kvstore-offload[otel]'"
            ) from None
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
            resource=Resource.create({"service.name": service, "service.version": __version__}),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(
            endpoint=settings.endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter, max_queue_size=QUEUE_SPANS, max_export_batch_size=BATCH_SPANS
            )
        )
        self._tracer = self._provider.get_tracer("kvstore", __version__)

    def record(self, name: str, seconds: float, attributes: Mapping[str, Any]) -> None:
        """Record a span that ends now and lasted `seconds`."""
        ended_ns = time.time_ns()
        span = self._tracer.start_span(
            name, start_time=ended_ns - int(seconds * 1e9), attributes=dict(attributes)
        )
        span.end(ended_ns)

    @contextmanager
    def request(self, method: str, headers: Mapping[bytes, bytes]) -> Iterator[RequestSpan]:
        """A span around a request; a child of the caller's span, if the headers name one."""
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
        """Send the queued spans, within a bounded time."""
        self._provider.force_flush(int(FLUSH_TIMEOUT_MS))
        self._provider.shutdown()


def open_tracer(settings: TraceSettings, service: str) -> Tracer | None:
    """A tracer, if one is configured."""
    return Tracer(settings, service) if settings.endpoint else None

"""Traces of jobs and requests; without the setting `traces`, OpenTelemetry is not even imported.

A job's trace begins with the command that submits it. Its context travels with the job, as the note
`NOTE` in the format of W3C Trace Context, so that workers on other machines go on with it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

NOTE: Final = "traceparent"
FLUSH_MS: Final = 5_000  # a collector that is away holds up the end of a process no longer
_state: Final = SimpleNamespace(tracer=None)

Fact = str | int | float


def is_installed() -> bool:
    """Tell whether the packages that traces need, `embedfarm[traces]`, are installed."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        return False


def start(endpoint: str, role: str) -> None:
    """Send what this process does from now on to an OTLP endpoint; "" sends nothing.

    Args:
        endpoint: URL for traces in protobuf, such as "http://localhost:4318/v1/traces".
        role: What this process is, such as "worker".

    Raises:
        ImportError: The packages that traces need are not installed.
    """
    if not endpoint:
        return
    from opentelemetry import trace  # noqa: PLC0415 -- see above
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 -- see above
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 -- see above
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 -- see above
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 -- see above

    exporter = OTLPSpanExporter(endpoint, timeout=FLUSH_MS / 1000)
    name = {"service.name": "embedfarm", "service.namespace": "embedfarm", "embedfarm.role": role}
    provider = TracerProvider(resource=Resource.create(name))  # at exit it sends what it still has
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)  # FastAPI traces its requests with it
    _state.tracer = trace.get_tracer("embedfarm")


def enabled() -> bool:
    """Tell whether this process sends traces."""
    return _state.tracer is not None


@contextmanager
def span(name: str, parent: str = "", **facts: Fact) -> Iterator[str]:
    """Trace the block as a span below `parent`, or else below this thread's current span.

    Yields:
        The span's context, for children in other processes; "" when nothing is traced.
    """
    if not enabled():
        yield ""
        return
    with _state.tracer.start_as_current_span(
        name, context=_read(parent) if parent else None, attributes=facts
    ) as begun:
        yield _write(begun)


def record(name: str, parent: str, began: float, ended: float, **facts: Fact) -> str:
    """Record a span that is over already, between two monotonic times; only while `enabled`.

    Returns:
        The span's context, for its children.
    """
    offset = time.time_ns() - time.monotonic_ns()
    done = _state.tracer.start_span(
        name, context=_read(parent), attributes=facts, start_time=int(began * 1e9) + offset
    )
    done.end(int(ended * 1e9) + offset)
    return _write(done)


def _read(parent: str) -> "Context":
    from opentelemetry.context import Context  # noqa: PLC0415 -- see above
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 -- see above
        TraceContextTextMapPropagator,
    )

    return TraceContextTextMapPropagator().extract({NOTE: parent}, Context())


def _write(begun: "Span") -> str:
    context = begun.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

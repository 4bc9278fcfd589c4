"""An agent whose program has configured OpenTelemetry itself, before whet does."""

import sys

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

EXPORTED = InMemorySpanExporter()
PROVIDER = TracerProvider()
PROVIDER.add_span_processor(SimpleSpanProcessor(EXPORTED))
if "pytest" not in sys.modules:  # the provider of a process is set once
    trace.set_tracer_provider(PROVIDER)


def solve(task: str) -> float:
    with trace.get_tracer("own").start_as_current_span(task):
        pass
    return float(len(EXPORTED.get_finished_spans()))

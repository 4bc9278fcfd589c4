"""OpenTelemetry's protocol for traces, as far as it is received: see `take`."""

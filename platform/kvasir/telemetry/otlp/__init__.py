"""The adapter of OpenTelemetry. Other modules import it only where there is a collector, so that a process
without tracing never loads the SDK."""

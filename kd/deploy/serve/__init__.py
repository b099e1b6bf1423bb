"""The endpoint: serves an export over HTTP, on a CPU, without torch."""

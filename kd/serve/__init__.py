"""The endpoint: serves an export over HTTP, on a CPU, without torch. It imports only errors and pixels of kd."""

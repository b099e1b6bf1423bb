"""The endpoint: an export answers over HTTP, on a CPU, without torch. Of kd it imports only errors and pixels."""

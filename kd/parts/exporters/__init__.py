"""Exporters: the graphs that an export may hold, one file a runtime. See `_exporter.py`."""

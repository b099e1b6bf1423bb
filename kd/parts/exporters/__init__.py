"""Write and load graphs of an export, one file per runtime. See `_exporter.py`."""

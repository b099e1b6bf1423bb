"""Exporters: formats of graphs in an export, one file per runtime. See
`_exporter.py`.
"""

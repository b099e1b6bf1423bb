"""The jobs behind commands, one per module: from a configuration or a run folder to
artifacts.
"""

"""The report of a run: its records as text, tables, figures and one page."""

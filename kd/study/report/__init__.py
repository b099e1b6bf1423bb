"""The report of a run: what its folder records as text, tables, figures and one page."""

"""Reports of runs: records as text, tables, figures and one page."""

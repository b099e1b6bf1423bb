"""Whether the claims of an export are true: its files, its images, its outputs, the run that it names."""

"""Files are read and written here, on disk or at a URL."""

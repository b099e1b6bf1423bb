"""Whether data are sound: images that repeat, and labels that a teacher doubts. NumPy and Pillow only."""

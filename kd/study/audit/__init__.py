"""Is a number true? Images that repeat, and labels that a teacher doubts. NumPy and Pillow only."""

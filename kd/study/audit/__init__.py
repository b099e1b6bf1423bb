"""Audit of data: repeated images, and labels that a teacher doubts. Uses only NumPy and Pillow."""

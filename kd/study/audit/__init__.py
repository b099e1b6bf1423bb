"""Find repeated images, and labels that a teacher doubts.

Uses NumPy and Pillow, no torch.
"""

"""Audit of data: repeated images, and labels that a teacher doubts. Uses NumPy, Pillow
and faiss, no torch.
"""

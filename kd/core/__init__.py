"""Shared by all rooms: errors, types, contracts, scores, intervals, seeds, text, this
machine.
"""

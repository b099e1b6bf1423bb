"""Timing of a run: timeline, samples of the machine, profiler, rules. The loop does not
import it.
"""

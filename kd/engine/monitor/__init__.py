"""Where the time of a run goes: timeline, samples of the machine, profiler, rules. The loop does not import it."""

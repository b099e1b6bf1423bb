"""Find bottlenecks by rules after SageMaker Debugger's: rows become a finding or None.

Each threshold is a constant with its reason. Each finding names one configuration key
and a value to try.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kd.core.recommended import stored_views
from kd.core.text import format_seconds
from kd.core.types import Loading
from kd.engine.monitor.evidence import Evidence, Facts, Finding, Row
from kd.engine.monitor.recurrence import SLOW, recurrence
from kd.engine.monitor.timeline import APART, share_of, summed

MIN_STEPS = 20  # steady steps before rules apply: one log window by default
DATA_WAIT = 0.10
"""Share of a step that waits for data. Below it at most a tenth can be saved, no more
than noise from a busy machine.
"""
LOADERS_BUSY = 0.7
"""Share of the time in which loader processes load. Below it they are partly idle, and
a waiting step has another cause: the first batch of an epoch, or transfer between
processes.
"""
READING = 0.5
"""Share of the loading time spent neither computing nor waiting for a core; above it,
reading dominates.
"""
CROWDED = 0.10
"""Share of the run's CPU use that surplus workers must have; below it they hardly slow
the step.
"""
FAR_TOO_MANY = 4
"""Data workers per core above which they are reported however little they take: at most
one per core computes, and each is a process of its own with decoded batches that wait.
"""
# share of a step; a student's own step is then at most three times as long as its
# teacher's forward
LIVE_TEACHER = 0.25
FLOAT32 = 0.5
"""Share of the time of student and teacher that bfloat16 saves at least where it pays:
a ViT-Ti at 224 px was 2.6 times as fast, 6.4 M parameters at 64 px 2.0 times (two cores
with AVX-512 BF16).
"""
# percent. SageMaker's CPUBottleneck has the same default (cpu_threshold).
FULL_CORES = 90.0
LOW_GPU = 70.0
"""Percent of mean GPU load. SageMaker's LowGPUUtilization takes 70 for the 95th
percentile (threshold_p95).
"""
# slowest rank relative to the median of the others. SageMaker's LoadBalancing has a
# threshold of 0.2.
IMBALANCE = 1.2
APART_MOST = {"evaluation": 0.25, "checkpoint": 0.1}
"""Largest shares of the time after the set-up. Half as many evaluations or checkpoints
are seldom missed.
"""
SCORING = 0.01
"""Share of the excess of slow steps above which they score images for a sifter. Other
sifting takes microseconds; scoring is a forward pass of teacher and student.
"""
PROFILED = 6  # steps of an advised profile
SERIOUS = 0.20
"""Share of the time that may be saved above which a finding is a warning, printed
during the run.
"""


class Advice(NamedTuple):
    """A key of the configuration, a value to try, and its effect."""

    key: str
    value: Any
    effect: str


def find_bottlenecks(evidence: Evidence) -> list[Finding]:
    """Return the findings of all rules, the most serious first."""
    if evidence.steps() < MIN_STEPS:
        return []
    findings = [finding for rule in RULES if (finding := rule(evidence)) is not None]
    return sorted(findings, key=lambda finding: finding.severity != "warning")


def _finding(
    rule: str, saves: float, evidence: str, threshold: str, advice: Advice
) -> Finding:
    severity = "warning" if saves >= SERIOUS else "info"
    text = f"Set {advice.key}={advice.value}: {advice.effect}"
    return Finding(rule, severity, evidence, threshold, text, advice.key, advice.value)


class Wait(NamedTuple):
    """The time that a step waits for data because loading is slow."""

    ms: float
    step_ms: float
    share: float
    loading: Loading  # sequential loading time of a step's images, milliseconds
    reading: float  # share of the loading time that waits for bytes
    text: str
    loading_text: str  # shares of the loading time, and the saving from decoding less


def data_wait(evidence: Evidence) -> Wait | None:
    """Return the wait for data, or None if it is short or loading may not cause it."""
    step = evidence.step()
    loading = evidence.loading()
    workers = evidence.facts.workers
    step_ms = sum(step.values())
    wait_ms = step.get("data", 0.0)
    if wait_ms < DATA_WAIT * step_ms or not loading.seconds:
        return None
    if loading.seconds < LOADERS_BUSY * workers * step_ms:
        return None
    share = wait_ms / step_ms
    reading = 1 - min(1.0, loading.busy / loading.seconds)
    text = (
        f"a step waits {wait_ms:.1f} of {step_ms:.1f} ms ({100 * share:.0f} %) for its"
        " data"
    )
    loading_text = _loading_text(loading, wait_ms, evidence.facts)
    return Wait(wait_ms, step_ms, share, loading, reading, text, loading_text)


def _loading_text(loading: Loading, wait_ms: float, facts: Facts) -> str:
    def share(ms: float) -> float:
        return 100 * ms / loading.seconds

    def saved(ms: float) -> float:
        return min(wait_ms, ms / max(1, facts.workers))

    text = f"{share(loading.decoding):.0f} % of the loading is decoding, "
    if share(loading.resizing):
        text += f"{share(loading.resizing):.0f} % resizing, the rest augmenting"
    else:
        text += "the rest resizing and augmenting"
    if facts.new_store:
        text += f"; a store would save {saved(loading.decoding):.1f} ms of a step"
    if loading.whole:
        text += (
            f"; {saved(loading.whole):.1f} ms decode whole images of twice the sides"
            " that are needed: JPEGs are decoded reduced"
        )
    return text


def _can_add_worker(evidence: Evidence) -> bool:
    facts = evidence.facts
    return facts.workers < facts.most_workers and (evidence.load() or 0.0) < FULL_CORES


def dataloader(evidence: Evidence) -> Finding | None:
    """Find a step that waits for decoding while idle cores could decode."""
    wait = data_wait(evidence)
    facts = evidence.facts
    if wait is None or wait.reading >= READING or not _can_add_worker(evidence):
        return None
    compute = max(wait.step_ms - wait.ms, 1e-9)
    needed = math.ceil(wait.loading.seconds / compute)
    value = max(facts.workers + 1, min(facts.most_workers, needed))
    text = (
        f"{wait.text}, with data.workers={facts.workers} on {facts.share} cores;"
        f" {wait.loading_text}"
    )
    threshold = f"{100 * DATA_WAIT:.0f} % of a step"
    advice = Advice(
        "data.workers", value, "images are then decoded while the step computes."
    )
    return _finding("Dataloader", wait.share, text, threshold, advice)


def io_bottleneck(evidence: Evidence) -> Finding | None:
    """Find loaders that mostly wait for bytes while the step waits for data."""
    wait = data_wait(evidence)
    facts = evidence.facts
    if wait is None or wait.reading < READING:
        return None
    text = (
        f"{wait.text}, and {100 * wait.reading:.0f} % of the loading time is waiting"
        " for bytes"
    )
    threshold = (
        f"{100 * DATA_WAIT:.0f} % of a step, {100 * READING:.0f} % of the loading"
    )
    return _finding("IOBottleneck", wait.share, text, threshold, _read_ahead(facts))


def _read_ahead(facts: Facts) -> Advice:
    """Return what shortens a wait for bytes."""
    if facts.new_store:
        effect = "each image is then read once, in the first epoch."
        return Advice("data.store", facts.new_store, effect)
    effect = "more images are then read at the same time."
    return Advice("data.workers", 2 * max(1, facts.workers), effect)


def cpu_bottleneck(evidence: Evidence) -> Finding | None:
    """Find more loader processes than cores, or no core left for decoding."""
    load = evidence.load()
    workers_cpu = evidence.mean(lambda sample: sample["workers_cpu"])
    process_cpu = evidence.mean(lambda sample: sample["process_cpu"])
    if load is None or workers_cpu is None or process_cpu is None:
        return None
    facts = evidence.facts
    text = f"the cores are {load:.0f} % busy"
    store = Advice(
        "data.store",
        facts.new_store,
        "each image is then decoded once, in the first epoch.",
    )
    loading = evidence.loading()
    workers_share = workers_cpu / max(workers_cpu + process_cpu, 1e-9)
    crowded = (
        facts.workers > facts.share
        and load >= FULL_CORES
        and workers_share >= CROWDED
        and loading.busy > (1 - READING) * loading.seconds
    )
    if crowded or facts.workers > FAR_TOO_MANY * facts.share:
        text += (
            f"; {facts.workers} data workers of a rank share {facts.share} cores with"
            f" the step and take {100 * workers_share:.0f} % of what the run uses of"
            " them"
        )
        fewer = 1 if facts.device == "cpu" else facts.most_workers
        advice = Advice("data.workers", fewer, "the step then has its cores.")
        decodes = loading.decoding >= READING * loading.seconds
        if crowded and decodes and facts.new_store:
            advice = store
        threshold = (
            f"{FULL_CORES:.0f} % of all cores, or {FAR_TOO_MANY} workers per core"
        )
        return _finding("CPUBottleneck", workers_share, text, threshold, advice)
    wait = data_wait(evidence)
    if wait is None or wait.reading >= READING or _can_add_worker(evidence):
        return None
    # a store saves 1.1 to 1.4 times the decoding time, since it also shrinks large
    # images
    saves = min(wait.ms, wait.loading.decoding / max(1, facts.workers)) / wait.step_ms
    if saves < DATA_WAIT or not facts.new_store:
        return None
    text += (
        f", and {wait.text}, with data.workers={facts.workers} on {facts.share} cores;"
        f" {wait.loading_text}"
    )
    threshold = (
        f"{100 * DATA_WAIT:.0f} % of a step that a store would save, and no core for"
        " another worker"
    )
    return _finding("CPUBottleneck", saves, text, threshold, store)


def live_teacher(evidence: Evidence) -> Finding | None:
    """Find a teacher that predicts every image anew in each epoch."""
    facts = evidence.facts
    views = stored_views(facts.epochs)
    share = share_of(evidence.step(), "teacher")
    saves = share * (1 - views / facts.epochs) if facts.live else 0.0
    if share < LIVE_TEACHER or saves < DATA_WAIT:
        return None
    text = (
        f"the teacher takes {100 * share:.0f} % of a step in each of {facts.epochs:.3g}"
        " epochs"
    )
    threshold = f"{100 * LIVE_TEACHER:.0f} % of a step"
    effect = (
        f"it then runs in the first {views} epochs only, and its outputs are stored."
    )
    advice = Advice("teacher.cache.views", views, effect)
    return _finding("Teacher", saves, text, threshold, advice)


def precision(evidence: Evidence) -> Finding | None:
    """Find matrix products in float32 on a device with units for bfloat16."""
    share = share_of(evidence.step(), "teacher", "forward", "backward")
    saves = FLOAT32 * share
    if saves < DATA_WAIT or not evidence.facts.float32():
        return None
    text = (
        f"student and teacher take {100 * share:.0f} % of a step and compute in"
        " float32, where bfloat16 has units"
    )
    threshold = f"{100 * DATA_WAIT:.0f} % of a step that it saves"
    effect = "two measured networks trained 2.0 and 2.6 times as fast."
    advice = Advice("backend.precision", "bf16", effect)
    return _finding("Precision", saves, text, threshold, advice)


def _gpu_load(evidence: Evidence, sample: Row) -> float:
    """Return the mean utilization of the busiest GPUs, one per rank."""
    # the run may use only some GPUs of the machine
    if evidence.facts.device != "cuda":
        return math.nan
    loads = [gpu["utilization"] for gpu in sample["gpu"] if "utilization" in gpu]
    busiest = sorted(loads, reverse=True)[: evidence.facts.local_ranks]
    return statistics.mean(busiest or [math.nan])


def low_gpu_utilization(evidence: Evidence) -> Finding | None:
    """Find an idle GPU, because of late data or of too little work at a time."""
    load = evidence.mean(lambda sample: _gpu_load(evidence, sample))
    if load is None or not load < LOW_GPU:
        return None
    wait = data_wait(evidence)
    if wait is None:
        cause = "loading is not the cause"
        effect = (
            "fewer, larger kernels keep it busy. Where it stays idle, a loss may read a"
            " value with .item()."
        )
        advice = Advice("student.compile", "on", effect)
    else:
        cause = wait.text
        workers = max(evidence.facts.workers + 1, evidence.facts.share - 1)
        advice = Advice("data.workers", workers, "the GPU then waits less.")
    text = f"the GPU is {load:.0f} % busy, and {cause}"
    threshold = f"{LOW_GPU:.0f} %"
    return _finding("LowGPUUtilization", 1 - load / 100, text, threshold, advice)


def load_balancing(evidence: Evidence) -> Finding | None:
    """Find a rank that works longer than the others, which wait for it."""
    ranks = [rank for rank in evidence.timelines if evidence.steps(rank) >= MIN_STEPS]
    if len(ranks) < 2:
        return None
    steps = {rank: evidence.step(rank) for rank in ranks}
    for step in steps.values():  # what a rank waits for the others is not its work
        step.pop("communication", None)
        step.pop("wait", None)
    lengths = {rank: sum(step.values()) for rank, step in steps.items()}
    slow = max(lengths, key=lambda rank: lengths[rank])
    other_ranks = [rank for rank in ranks if rank != slow]
    usual = statistics.median(lengths[rank] for rank in other_ranks)
    if lengths[slow] < IMBALANCE * usual:
        return None
    excess = {
        name: ms - statistics.median(steps[rank].get(name, 0.0) for rank in other_ranks)
        for name, ms in steps[slow].items()
    }
    span = max(excess, key=lambda name: excess[name])
    text = (
        f"rank {slow} works {lengths[slow]:.0f} ms per step and the others {usual:.0f};"
        f" the difference is in {span}"
    )
    threshold = f"{IMBALANCE:g} times the others"
    saves = 1 - usual / lengths[slow]
    store = evidence.facts.new_store
    if span == "data" and store:
        effect = "reading and decoding then cost each rank the same."
        advice = Advice("data.store", store, effect)
    elif span == "data" and evidence.facts.workers == 0:
        effect = "its data are then loaded while it computes."
        advice = Advice("data.workers", 1, effect)
    else:
        last = evidence.steady()[-1]["step"]
        profiled = [max(1, last - PROFILED), last - 1]
        effect = "the trace of rank 0 shows where it waits."
        advice = Advice("profile.steps", profiled, effect)
    return _finding("LoadBalancing", saves, text, threshold, advice)


def time_share(evidence: Evidence) -> Finding | None:
    """Find evaluations or checkpoints that take too large a share of the time."""
    rows = [
        row
        for row in evidence.timelines.get(0, ())
        if row["kind"] != "setup" and row.get("clock") != "tracing"
    ]
    times = summed([row.get("device_ms", row["ms"]) for row in rows])
    steps = sum(row["steps"] for row in rows)
    for name, key, every in _schedules(evidence.facts):
        share = share_of(times, name)
        threshold = APART_MOST[name]
        # the last one always happens
        if share < threshold or steps < 2 * every or not every:
            continue
        ratio = share / (1 - share)
        goal = threshold / 2
        value = every * math.ceil(ratio * (1 - goal) / goal)
        effect = f"there is then one in {value} steps instead of {every}."
        usual_ms = sum(ms for span, ms in times.items() if span not in APART) / steps
        slow_ms = usual_ms + times[name] * every / steps
        text = (
            f"{name} takes {100 * share:.0f} % of the time; with it"
            f" {_alternation(every, slow_ms, usual_ms)}"
        )
        return _finding(
            "TimeShare",
            share - goal,
            text,
            f"{100 * threshold:.0f} %",
            Advice(key, value, effect),
        )
    return None


def _schedules(facts: Facts) -> tuple[tuple[str, str, int], ...]:
    """Return span, key and interval in steps (0: unknown) of what recurs by plan."""
    return (
        ("evaluation", "run.every.evaluate", facts.evaluate),
        ("checkpoint", "run.every.checkpoint", facts.checkpoint),
    )


def recurring_steps(evidence: Evidence) -> Finding | None:
    """Find steps that are slow at a regular interval, and what alternates with them."""
    steps = evidence.latest_steps()
    inside = [
        {name: ms for name, ms in step.items() if name not in APART} for step in steps
    ]
    pattern = recurrence([sum(step.values()) for step in inside])
    if pattern is None or pattern.share < DATA_WAIT:
        return None
    excess = pattern.excess(inside)
    # a sifter scores the images of several steps at a time
    if excess.get("sifting", 0.0) > SCORING * (pattern.slow_ms - pattern.usual_ms):
        return None
    span = max(excess, key=lambda name: excess[name])
    events = [
        name
        for name in APART_MOST
        if pattern.follows([step.get(name, 0.0) > 0 for step in steps])
    ]
    last_slow = evidence.steady()[-1]["step"] - pattern.since(len(steps))
    epoch = evidence.facts.epoch
    if epoch > 1 and pattern.period % epoch == 0 == (last_slow - 1) % epoch:
        events.append("start of an epoch")
    lengths_text = _alternation(pattern.period, pattern.slow_ms, pattern.usual_ms)
    text = f"{lengths_text}; the slow ones {_cause(span, evidence)}"
    if events:
        text += f", after the {' and '.join(events)}"
    threshold = f"{SLOW:g} times the others, {100 * DATA_WAIT:.0f} % of the time"
    advice = _against_slow_steps(
        span, events, pattern.period, last_slow, evidence.facts
    )
    return _finding("RecurringSteps", pattern.share, text, threshold, advice)


def _alternation(period: int, slow_ms: float, usual_ms: float) -> str:
    slow, usual = (format_seconds(ms / 1000) for ms in (slow_ms, usual_ms))
    return f"one step in {period} takes {slow}, the others {usual}"


def _cause(span: str, evidence: Evidence) -> str:
    """Return what the slow steps do longer than the others."""
    loading = evidence.loading()
    if span != "data":
        return f"spend the difference in {span}"
    if not loading.seconds:  # other hosts load
        return "wait for data"
    reads = loading.busy < (1 - READING) * loading.seconds
    return f"wait for data: {'storage' if reads else 'decoding and augmenting'}"


def _against_slow_steps(
    span: str, events: Sequence[str], period: int, last_slow: int, facts: Facts
) -> Advice:
    if span == "data":
        return _read_ahead(facts)
    for name, key, every in _schedules(facts):
        if name in events and period == every:
            return Advice(key, 2 * every, f"half as many steps then follow the {name}.")
    effect = "the trace shows a usual step and a slow one."
    return Advice("profile.steps", [last_slow - 1, last_slow], effect)


RULES: tuple[Callable[[Evidence], Finding | None], ...] = (
    cpu_bottleneck,
    io_bottleneck,
    precision,
    live_teacher,
    low_gpu_utilization,
    load_balancing,
    dataloader,
    time_share,
    recurring_steps,
)

"""Rules that find bottlenecks, after SageMaker Debugger's: functions from rows to a
finding or None.

Each threshold is a constant with its reason. Each finding names one configuration key
and a value to try.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from kd.core.recommended import stored_views
from kd.core.types import Loading
from kd.engine.monitor.evidence import Evidence, Facts, Finding, Row
from kd.engine.monitor.timeline import summed

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
FULL_CORES = (
    90.0  # percent. SageMaker's CPUBottleneck has the same default (cpu_threshold).
)
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


def find(evidence: Evidence) -> list[Finding]:
    """Return the findings of all rules, the most serious first; none before
    `MIN_STEPS`.
    """
    rules = RULES if evidence.steps() >= MIN_STEPS else ()
    findings = [finding for rule in rules if (finding := rule(evidence)) is not None]
    return sorted(findings, key=lambda finding: finding.severity != "warning")


def _finding(
    rule: str, saves: float, evidence: str, threshold: str, advice: Advice
) -> Finding:
    severity, text = (
        ("warning" if saves >= SERIOUS else "info"),
        f"Set {advice.key}={advice.value}: {advice.effect}",
    )
    return Finding(rule, severity, evidence, threshold, text, advice.key, advice.value)


class Wait(NamedTuple):
    """The time that a step waits for data because loading is slow."""

    ms: float
    step_ms: float
    share: float
    loading: Loading  # sequential loading time of a step's images, milliseconds
    reading: float  # share of the loading time that waits for bytes
    text: str
    parts: str  # parts of the loading time, and the saving from decoding less


def data_wait(evidence: Evidence) -> Wait | None:
    """Return the wait for data; None if it is short, or if loading is not known to be
    its cause.
    """
    step, facts, loading = evidence.step(), evidence.facts, evidence.loading()
    step_ms, data = sum(step.values()), step.get("data", 0.0)
    if data < DATA_WAIT * step_ms or not loading.seconds:
        return None
    if loading.seconds < LOADERS_BUSY * facts.workers * step_ms:
        return None
    share, reading = data / step_ms, 1 - min(1.0, loading.busy / loading.seconds)
    text = (
        f"a step waits {data:.1f} of {step_ms:.1f} ms ({100 * share:.0f} %) for its"
        " data"
    )
    return Wait(
        data, step_ms, share, loading, reading, text, _parts(loading, data, facts)
    )


def _parts(loading: Loading, wait_ms: float, facts: Facts) -> str:
    decoding, resizing = (
        100 * part / loading.seconds for part in (loading.decoding, loading.resizing)
    )
    saved = [
        min(wait_ms, part / max(1, facts.workers))
        for part in (loading.decoding, loading.whole)
    ]
    text = f"{decoding:.0f} % of the loading is decoding, "
    text += (
        f"{resizing:.0f} % resizing, the rest augmenting"
        if resizing
        else "the rest resizing and augmenting"
    )
    text += (
        f"; a store would save {saved[0]:.1f} ms of a step" if facts.new_store else ""
    )
    if loading.whole:
        text += (
            f"; {saved[1]:.1f} ms decode whole images of twice the sides that are"
            " needed: JPEGs are decoded reduced"
        )
    return text


def _can_add_worker(evidence: Evidence) -> bool:
    return (
        evidence.facts.workers < evidence.facts.room
        and (evidence.load() or 0.0) < FULL_CORES
    )


def dataloader(evidence: Evidence) -> Finding | None:
    """Too few loader processes: the step waits for decoding, and idle cores could
    decode.
    """
    wait, facts = data_wait(evidence), evidence.facts
    if wait is None or wait.reading >= READING or not _can_add_worker(evidence):
        return None
    compute = max(wait.step_ms - wait.ms, 1e-9)
    value = max(
        facts.workers + 1, min(facts.room, math.ceil(wait.loading.seconds / compute))
    )
    text = (
        f"{wait.text}, with data.workers={facts.workers} on {facts.share} cores;"
        f" {wait.parts}"
    )
    advice = Advice(
        "data.workers", value, "images are then decoded while the step computes."
    )
    return _finding(
        "Dataloader", wait.share, text, f"{100 * DATA_WAIT:.0f} % of a step", advice
    )


def io_bottleneck(evidence: Evidence) -> Finding | None:
    """The step waits for bytes: the loaders mostly wait for reads."""
    wait, facts = data_wait(evidence), evidence.facts
    if wait is None or wait.reading < READING:
        return None
    text = (
        f"{wait.text}, and {100 * wait.reading:.0f} % of the loading time is waiting"
        " for bytes"
    )
    threshold = (
        f"{100 * DATA_WAIT:.0f} % of a step, {100 * READING:.0f} % of the loading"
    )
    advice = Advice(
        "data.workers",
        2 * max(1, facts.workers),
        "more images are then read at the same time.",
    )
    if facts.new_store:
        advice = Advice(
            "data.store",
            facts.new_store,
            "each image is then read once, in the first epoch.",
        )
    return _finding("IOBottleneck", wait.share, text, threshold, advice)


def cpu_bottleneck(evidence: Evidence) -> Finding | None:
    """The cores are full: more loader processes than cores, or no core left for
    decoding.
    """
    facts, wait, load = evidence.facts, data_wait(evidence), evidence.load()
    workers, own = (
        evidence.mean(lambda sample, name=name: sample[name])
        for name in ("workers_cpu", "process_cpu")
    )
    if load is None or workers is None or own is None:
        return None
    text, taken, loading = (
        f"the cores are {load:.0f} % busy",
        workers / max(workers + own, 1e-9),
        evidence.loading(),
    )
    decodes = loading.decoding >= READING * loading.seconds
    store = Advice(
        "data.store",
        facts.new_store,
        "each image is then decoded once, in the first epoch.",
    )
    computes = loading.busy > (1 - READING) * loading.seconds
    crowded = (
        facts.workers > facts.share
        and load >= FULL_CORES
        and taken >= CROWDED
        and computes
    )
    if crowded or facts.workers > FAR_TOO_MANY * facts.share:
        text += (
            f"; {facts.workers} data workers of a rank share {facts.share} cores with"
            " the step and take "
        )
        text += f"{100 * taken:.0f} % of what the run uses of them"
        fewer = Advice(
            "data.workers",
            1 if facts.device == "cpu" else facts.room,
            "the step then has its cores.",
        )
        advice = store if crowded and decodes and facts.new_store else fewer
        threshold = (
            f"{FULL_CORES:.0f} % of all cores, or {FAR_TOO_MANY} workers per core"
        )
        return _finding("CPUBottleneck", taken, text, threshold, advice)
    if wait is None or wait.reading >= READING or _can_add_worker(evidence):
        return None
    # a store saves 1.1 to 1.4 times the decoding time, since it also shrinks large
    # images
    saves = min(wait.ms, wait.loading.decoding / max(1, facts.workers)) / wait.step_ms
    if saves < DATA_WAIT or not facts.new_store:
        return None
    text += (
        f", and {wait.text}, with data.workers={facts.workers} on {facts.share} cores;"
        f" {wait.parts}"
    )
    threshold = (
        f"{100 * DATA_WAIT:.0f} % of a step that a store would save, and no core for"
        " another worker"
    )
    return _finding("CPUBottleneck", saves, text, threshold, store)


def _gpu(evidence: Evidence, sample: Row, name: str) -> float:
    """Return the mean of the highest values, one per rank: the run may use only some
    GPUs of the machine.
    """
    values = sorted((gpu[name] for gpu in sample["gpu"] if name in gpu), reverse=True)
    used = (
        values[: evidence.facts.local_ranks] if evidence.facts.device == "cuda" else []
    )
    return statistics.mean(used or [math.nan])


def live_teacher(evidence: Evidence) -> Finding | None:
    """The teacher predicts every image anew, in each epoch."""
    step, facts = evidence.step(), evidence.facts
    views = stored_views(facts.epochs)
    share = step.get("teacher", 0.0) / max(sum(step.values()), 1e-9)
    saves = share * (1 - views / facts.epochs) if facts.live else 0.0
    if share < LIVE_TEACHER or saves < DATA_WAIT:
        return None
    text = (
        f"the teacher takes {100 * share:.0f} % of a step in each of {facts.epochs:.3g}"
        " epochs"
    )
    effect = (
        f"it then runs in the first {views} epochs only, and its outputs are stored."
    )
    advice = Advice("teacher.cache.views", views, effect)
    return _finding(
        "Teacher", saves, text, f"{100 * LIVE_TEACHER:.0f} % of a step", advice
    )


def precision(evidence: Evidence) -> Finding | None:
    """The matrix products are in float32 on a device with units for bfloat16."""
    step = evidence.step()
    computing = sum(step.get(name, 0.0) for name in ("teacher", "forward", "backward"))
    share = computing / max(sum(step.values()), 1e-9)
    if FLOAT32 * share < DATA_WAIT or not evidence.facts.float32():
        return None
    text = (
        f"student and teacher take {100 * share:.0f} % of a step and compute in"
        " float32, where bfloat16 has units"
    )
    advice = Advice(
        "backend.precision",
        "bf16",
        "two measured networks trained 2.0 and 2.6 times as fast.",
    )
    return _finding(
        "Precision",
        FLOAT32 * share,
        text,
        f"{100 * DATA_WAIT:.0f} % of a step that it saves",
        advice,
    )


def low_gpu_utilization(evidence: Evidence) -> Finding | None:
    """The GPU is idle: data arrive late, or the host launches too little work at a
    time.
    """
    load = evidence.mean(lambda sample: _gpu(evidence, sample, "utilization"))
    if load is None or not load < LOW_GPU:
        return None
    wait, facts = data_wait(evidence), evidence.facts
    effect = (
        "fewer, larger kernels keep it busy. Where it stays idle, a loss may read a"
        " value with .item()."
    )
    advice, cause = Advice("student.compile", "on", effect), "loading is not the cause"
    if wait is not None:
        more = max(facts.workers + 1, facts.share - 1)
        advice, cause = (
            Advice("data.workers", more, "the GPU then waits less."),
            wait.text,
        )
    text = f"the GPU is {load:.0f} % busy, and {cause}"
    return _finding(
        "LowGPUUtilization", 1 - load / 100, text, f"{LOW_GPU:.0f} %", advice
    )


def _last_steps(evidence: Evidence) -> list[int]:
    last = evidence.steady()[-1]["step"]
    return [max(1, last - PROFILED), last - 1]


def load_balancing(evidence: Evidence) -> Finding | None:
    """One rank works longer than the others, which wait for it."""
    ranks = [rank for rank in evidence.timelines if evidence.steps(rank) >= MIN_STEPS]
    if len(ranks) < 2:
        return None
    own = {
        rank: {
            n: v
            for n, v in evidence.step(rank).items()
            if n not in ("communication", "wait")
        }
        for rank in ranks
    }
    lengths = {rank: sum(step.values()) for rank, step in own.items()}
    slow = max(lengths, key=lambda rank: lengths[rank])
    others = [rank for rank in ranks if rank != slow]
    usual = statistics.median(lengths[rank] for rank in others)
    if lengths[slow] < IMBALANCE * usual:
        return None
    excess = {
        n: v - statistics.median(own[rank].get(n, 0.0) for rank in others)
        for n, v in own[slow].items()
    }
    span = max(excess, key=lambda name: excess[name])
    text = (
        f"rank {slow} works {lengths[slow]:.0f} ms per step and the others {usual:.0f};"
        f" the difference is in {span}"
    )
    threshold, saves = f"{IMBALANCE:g} times the others", 1 - usual / lengths[slow]
    advice = Advice(
        "profile.steps",
        _last_steps(evidence),
        "the trace of rank 0 shows where it waits.",
    )
    if span == "data" and (store := evidence.facts.new_store):
        advice = Advice(
            "data.store", store, "reading and decoding then cost each rank the same."
        )
    elif span == "data" and evidence.facts.workers == 0:
        advice = Advice(
            "data.workers", 1, "its data are then loaded while it computes."
        )
    return _finding("LoadBalancing", saves, text, threshold, advice)


def time_share(evidence: Evidence) -> Finding | None:
    """Evaluations or checkpoints take too large a share of the time."""
    rows = [
        row
        for row in evidence.timelines.get(0, ())
        if row["kind"] != "setup" and row.get("clock") != "tracing"
    ]
    total, made = (
        summed([row.get("device_ms", row["ms"]) for row in rows]),
        sum(row["steps"] for row in rows),
    )
    for name, every in (
        ("evaluation", evidence.facts.evaluate),
        ("checkpoint", evidence.facts.checkpoint),
    ):
        share = total.get(name, 0.0) / max(sum(total.values()), 1e-9)
        if (
            share < APART_MOST[name] or made < 2 * every or not every
        ):  # the last one always happens
            continue
        rest, most = share / (1 - share), APART_MOST[name] / 2
        value = every * math.ceil(rest * (1 - most) / most)
        key = {
            "evaluation": "run.every.evaluate",
            "checkpoint": "run.every.checkpoint",
        }[name]
        advice = Advice(
            key, value, f"there is then one in {value} steps instead of {every}."
        )
        text = f"{name} takes {100 * share:.0f} % of the time"
        return _finding(
            "TimeShare", share - most, text, f"{100 * APART_MOST[name]:.0f} %", advice
        )
    return None


RULES: tuple[Callable[[Evidence], Finding | None], ...] = (
    cpu_bottleneck,
    io_bottleneck,
    precision,
    live_teacher,
    low_gpu_utilization,
    load_balancing,
    dataloader,
    time_share,
)

"""Observe a run: timeline, samples of the machine, profiler; report at the end where
the time went and why.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kd.core.errors import RunError
from kd.core.facts import BackendFacts
from kd.core.host import cores
from kd.core.types import Loading, State
from kd.engine.monitor.timeline import APART, SPANS, Timeline
from kd.engine.run import Logger, Run
from kd.files.run_dir import RunDir
from kd.files.storage import LAST, log, read_rows, write_json
from kd.models.live_teacher import LiveTeacher
from kd.setup.build_teacher import Setting
from kd.setup.modes import made_of

if TYPE_CHECKING:
    from kd.engine.monitor.evidence import Facts, Finding
    from kd.engine.monitor.system import Monitor

LIVE_SECONDS, LIVE_BYTES = 30.0, 2**17
"""Seconds between two applications of the rules, and bytes read per file: one takes
milliseconds.
"""
TRACED = (
    "the host hands work over and does not wait for it: only data, wait and the whole"
    " are times of the device"
)


_reached: list[
    float
] = []  # time up to which this command's tables account (`time.perf_counter`)


@contextmanager
def gapless_time_tables(began: float) -> Iterator[None]:
    """Let the time tables of the runs in this block have no gaps, the first beginning
    at `began`.
    """
    _reached[:] = [began]
    try:
        yield
    finally:
        _reached.clear()


def span_clock(facts: BackendFacts) -> str:
    """Return the clock of spans for a kind of backend. See `Timeline`."""
    return "tracing" if facts.compiles else "device" if facts.cuda else "host"


class Observer:
    """Observes a run from the opened run folder to the end of the loop. A context."""

    def __init__(self, setting: Setting, folder: RunDir, logger: Logger) -> None:
        backend, traced = setting.backend, setting.recipe.config.profile.steps
        self.setting, self.backend, self.folder, self.logger = (
            setting,
            backend,
            folder,
            logger,
        )
        folder.path.mkdir(
            parents=True, exist_ok=True
        )  # the host does not share the run folder
        start, own = folder.step(), folder.path / f"timeline_{backend.rank}.jsonl"
        clock = span_clock(backend.facts)
        since, profiler = _reached[0] if _reached else time.perf_counter(), None
        self.timeline = Timeline(
            clock, own, start, backend.communication_ms, since=since
        )
        if traced and backend.rank == 0:
            from kd.engine.monitor.profiler import (
                Profiler,
            )  # imports torch.profiler: only if steps are named

            profiler = Profiler(
                traced, folder.path / "profile", backend.facts.cuda, self.timeline.span
            )
            self.timeline.on_step = profiler.step
        self._profiler = profiler
        self.monitor: Monitor | None = None
        if backend.local_rank == 0:
            from kd.engine.monitor.system import (
                Monitor,
                file_name,
            )  # one rank per host samples it

            file = folder.path / file_name(socket.gethostname(), backend.rank)
            self.monitor = Monitor(file, fresh=start == 0)
        self._run: Run | None = None
        self._shown: set[str] = set()
        self._looked = time.monotonic()

    def watch(self, run: Run) -> Run:
        self._run = run
        self.timeline.loading = lambda: getattr(run.loader, "loading", Loading())
        return replace(run, span=self.timeline.span, window=self.window)

    def __enter__(self) -> Observer:
        self._stack = ExitStack()
        self._stack.enter_context(self.timeline)
        if self.monitor is not None:
            self._stack.enter_context(self.monitor)
        if self._profiler is not None:
            self._stack.callback(self._profiler.close)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        _reached[:] = [time.perf_counter()] if _reached else []

    def window(self, state: State) -> Mapping[str, float]:
        """End a log window; now and then also apply the rules. See
        `kd.engine.run.Window`.
        """
        values = self.timeline.window(state)
        if self.backend.rank == 0 and time.monotonic() - self._looked >= LIVE_SECONDS:
            self._looked = time.monotonic()
            for finding in self._findings(self._timelines(live=True), live=True):
                if finding.severity == "warning" and finding.rule not in self._shown:
                    self._shown.add(finding.rule)
                    self.logger.info(finding_line(finding))
        return values

    def _timelines(self, live: bool = False) -> dict[int, list[dict[str, Any]]]:
        last = LIVE_BYTES if live else LAST
        return {
            rank: read_rows(self.folder.path / f"timeline_{rank}.jsonl", last)
            for rank in range(self.backend.world_size)
        }

    def _findings(
        self, timelines: dict[int, list[dict[str, Any]]], live: bool = False
    ) -> list[Finding]:
        from kd.engine.monitor.evidence import (
            Evidence,
        )  # the next two are set once there are steps to judge
        from kd.engine.monitor.rules import find

        assert self._run is not None
        samples = (
            read_rows(self.monitor.path, LIVE_BYTES if live else LAST)
            if self.monitor is not None
            else []
        )
        facts = run_facts(self.setting, self._run)
        if live:  # the network is in use
            facts = replace(facts, float32=lambda: False)
        return find(Evidence(timelines, samples, facts))

    def report(self, title: str, timed: bool = True) -> None:
        """Report findings, and the table of times if `timed`, after the context. All
        ranks must call it.
        """
        self.backend.barrier()  # every rank has written its rows
        if self.backend.rank != 0:
            return
        timelines = self._timelines()
        missing = [str(rank) for rank, rows in timelines.items() if not rows]
        if missing:
            ranks = ", ".join(missing)
            self.logger.info(
                f"{title}: no timeline of rank {ranks} in '{self.folder.path}': each"
                " host keeps its own"
            )
        for line in time_table(title, self.timeline) if timed else ():
            self.logger.info(line)
        findings = self._findings(timelines)
        for finding in findings:
            self.logger.info(finding_line(finding))
        try:
            write_json(
                self.folder.path / "findings.json",
                [asdict(finding) for finding in findings],
            )
        except RunError as error:  # the run has done its work
            log.warning(str(error))


def run_facts(setting: Setting, run: Run) -> Facts:
    """Return the facts of a run for the rules."""
    from kd.engine.monitor.evidence import Facts

    backend = run.backend
    evaluate = run.length.every.evaluate or max(
        1, len(setting.data.train) // run.length.batch_size
    )
    return Facts(
        device=backend.device.type,
        cores=cores(),
        local_ranks=backend.local_world_size,
        workers=getattr(run.loader, "workers", 0),
        store=setting.data.plan.store,
        epochs=run.length.steps
        * run.length.batch_size
        / max(1, len(setting.data.train))
        or run.length.epochs,
        live=isinstance(run.teacher, LiveTeacher) and not run.teacher.divided,
        float32=partial(_needless_float32, setting, run),
        evaluate=evaluate,
        checkpoint=run.length.every.checkpoint or evaluate,
    )


def _needless_float32(setting: Setting, run: Run) -> bool:
    """Return whether the configuration asks for float32 where the rule for `auto` would
    choose bfloat16.
    """
    backend = setting.backend
    if setting.recipe.backend.precision != "fp32" or not backend.auto_mode.startswith(
        "bf16"
    ):
        return False
    return backend.bf16_pays(partial(made_of, run.distillation.student), True)


def finding_line(finding: Finding) -> str:
    """Return a finding as one line."""
    return f"{finding.rule}: {finding.evidence}. {finding.advice}"


SHOWN_SHARE = 0.0005  # share of the time below which a part would be shown as 0.0 %


def time_table(title: str, timeline: Timeline) -> list[str]:
    """Return the table of a run's time as lines; empty if it made no step."""
    totals, steps = timeline.totals, timeline.made
    total = sum(totals.values())
    if not steps or not total:
        return []
    names = [
        *(name for name in SPANS if name in totals),
        *sorted(totals.keys() - set(SPANS)),
    ]
    rows = [
        (name, totals[name]) for name in names if totals[name] / total >= SHOWN_SHARE
    ] + [("all", total)]
    note = f" ({TRACED})" if timeline.clock == "tracing" else ""
    lines = [f"{title}: where the time of {steps} steps went{note}"]
    for name, ms in rows:
        each = f"{ms / steps:10.2f} ms per step" if name not in ("all", *APART) else ""
        lines.append(f"  {name:<14}{ms / 1000:10.2f} s{100 * ms / total:7.1f} %{each}")
    return lines

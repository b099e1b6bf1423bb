"""Observe a run by timeline, machine samples and profiler; report where time went."""

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
from kd.setup.build_teacher import RunContext
from kd.setup.modes import convolution_shares

if TYPE_CHECKING:
    from kd.engine.monitor.evidence import Facts, Finding
    from kd.engine.monitor.system import Monitor

LIVE_SECONDS = 30.0  # between two applications of the rules, which take 0.1 s
LIVE_BYTES = 2**17  # read per file for them
TRACED = (
    "the host hands work over and does not wait for it: only data, wait and the whole"
    " are times of the device"
)


# time up to which this command's tables account (`time.perf_counter`)
_accounted_until: list[float] = []


@contextmanager
def gapless_time_tables(began: float) -> Iterator[None]:
    """Let the time tables of this block's runs join, the first from `began`."""
    _accounted_until[:] = [began]
    try:
        yield
    finally:
        _accounted_until.clear()


def span_clock(facts: BackendFacts) -> str:
    """Return the clock of spans for a kind of backend. See `Timeline`."""
    if facts.compiles:
        return "tracing"
    return "device" if facts.cuda else "host"


class Observer:
    """Observe a run from the opened run folder to the end of the loop. A context."""

    def __init__(self, setting: RunContext, folder: RunDir, logger: Logger) -> None:
        self.setting = setting
        self.backend = backend = setting.backend
        self.folder = folder
        self.logger = logger
        # the host may not share the run folder
        folder.path.mkdir(parents=True, exist_ok=True)
        first_step = folder.step()
        self.timeline = Timeline(
            span_clock(backend.facts),
            folder.path / f"timeline_{backend.rank}.jsonl",
            first_step,
            backend.communication_ms,
            since=_accounted_until[0] if _accounted_until else time.perf_counter(),
        )
        traced_steps = setting.recipe.config.profile.steps
        self._profiler = None
        if traced_steps and backend.rank == 0:
            # imports torch.profiler: only if steps are named
            from kd.engine.monitor.profiler import Profiler

            self._profiler = Profiler(
                traced_steps,
                folder.path / "profile",
                backend.facts.cuda,
                self.timeline.span,
            )
            self.timeline.on_step = self._profiler.step
        self.monitor: Monitor | None = None
        if backend.local_rank == 0:
            # one rank per host samples it
            from kd.engine.monitor.system import Monitor, file_name

            file = folder.path / file_name(socket.gethostname(), backend.rank)
            self.monitor = Monitor(file, fresh=first_step == 0)
        self._run: Run | None = None
        self._warned_rules: set[str] = set()
        self._rules_applied = time.monotonic()

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
        if _accounted_until:
            _accounted_until[:] = [time.perf_counter()]

    def window(self, state: State) -> Mapping[str, float]:
        """End a log window (`kd.engine.run.Window`); now and then apply the rules."""
        values = self.timeline.window(state)
        elapsed_seconds = time.monotonic() - self._rules_applied
        if self.backend.rank == 0 and elapsed_seconds >= LIVE_SECONDS:
            self._rules_applied = time.monotonic()
            for finding in self._findings(self._timelines(live=True), live=True):
                is_new = finding.rule not in self._warned_rules
                if finding.severity == "warning" and is_new:
                    self._warned_rules.add(finding.rule)
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
        from kd.engine.monitor.evidence import Evidence
        from kd.engine.monitor.rules import find_bottlenecks

        assert self._run is not None
        samples = []
        if self.monitor is not None:
            samples = read_rows(self.monitor.path, LIVE_BYTES if live else LAST)
        facts = run_facts(self.setting, self._run)
        if live:  # the network is in use
            facts = replace(facts, float32=lambda: False)
        return find_bottlenecks(Evidence(timelines, samples, facts))

    def report(self, title: str, timed: bool = True) -> None:
        """Report findings after the context, and the table of times if `timed`.

        All ranks must call it.
        """
        self.backend.barrier()  # every rank has written its rows
        if self.backend.rank != 0:
            return
        timelines = self._timelines()
        missing = ", ".join(str(rank) for rank, rows in timelines.items() if not rows)
        if missing:
            self.logger.info(
                f"{title}: no timeline of rank {missing} in '{self.folder.path}': each"
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


def run_facts(setting: RunContext, run: Run) -> Facts:
    """Return the facts of a run for the rules."""
    from kd.engine.monitor.evidence import Facts

    backend = run.backend
    epoch = max(1, len(setting.data.train) // run.length.batch_size)
    evaluate = run.length.every.evaluate or epoch
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
        epoch=epoch,
    )


def _needless_float32(setting: RunContext, run: Run) -> bool:
    """Return whether float32 is configured where `auto` would choose bfloat16."""
    backend = setting.backend
    return (
        setting.recipe.backend.precision == "fp32"
        and backend.auto_mode.startswith("bf16")
        and backend.bf16_pays(
            partial(convolution_shares, run.distillation.student), True
        )
    )


def finding_line(finding: Finding) -> str:
    """Return a finding as one line."""
    return f"{finding.rule}: {finding.evidence}. {finding.advice}"


SHOWN_SHARE = 0.0005  # share of the time below which a part would be shown as 0.0 %


def time_table(title: str, timeline: Timeline) -> list[str]:
    """Return the table of a run's time as lines; empty if it made no step."""
    totals = timeline.totals
    steps = timeline.finished_steps
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

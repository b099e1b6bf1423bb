"""torch.profiler for a few steps of a run: a trace for Perfetto, and the top operators."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from kd.files.storage import log, write_text

TOP = 30  # operators that operators.txt lists


class Profiler:
    """Profile the steps from `first` to `last`, both included, into a folder. Steps count from the start of the run."""

    def __init__(
        self, steps: Sequence[int], folder: Path, cuda: bool, span: Callable[[str], AbstractContextManager[object]]
    ) -> None:
        """Prepare to profile `steps`, (first, last) or empty, into `folder`."""
        # `cuda` also traces the GPU's kernels. Starting and writing take place in a span of their own.
        self.first, self.last = (steps[0], steps[1]) if steps else (0, -1)
        self.folder, self.cuda, self.span = folder, cuda, span
        self._running: profile | None = None

    def step(self, number: int) -> None:
        if self.first <= number <= self.last and self._running is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # it reports a missing GPU as an error
            activities = [ProfilerActivity.CPU]
            if self.cuda:
                activities.append(ProfilerActivity.CUDA)
            with self.span("profile"):
                self._running = profile(activities=activities, profile_memory=True).__enter__()
        elif self._running is not None and number > self.last:
            self.close()

    def close(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        with self.span("profile"):
            running.__exit__(None, None, None)
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                running.export_chrome_trace(str(self.folder / "trace.json.gz"))
                by = "self_device_time_total" if self.cuda else "self_cpu_time_total"
                table = running.key_averages().table(sort_by=by, row_limit=TOP, max_name_column_width=80)
                write_text(self.folder / "operators.txt", table, "profile")
            except OSError as error:
                log.warning(f"profile: '{self.folder}' cannot be written ({error}). Training goes on without it.")

"""The metrics of a run: kept on the device, summed and logged every few steps."""

import math
import time
from dataclasses import replace

import torch
from torch import Tensor

from kd.core.errors import NonFiniteLoss
from kd.core.host import cpu_seconds
from kd.core.types import Plan, State
from kd.engine.run import Run

# The same command would resume from the last checkpoint and diverge at the same step
# again.
LOWER = (
    "Choose another run.name with a lower optimizer.lr, with optimizer.clip_grad_norm"
    " or with backend.precision=fp32"
)
AFTER_DIVERGING = (
    f"{LOWER}; or go on without such steps with optimizer.on_nonfinite=skip"
)
AFTER_SKIPPING = f"{LOWER}; optimizer.on_nonfinite=error names the first layer"
MOST_SKIPPED = 10  # most skipped steps in a row: a diverged run does not recover


class Meter:
    """Keep a few numbers of each step on the device, until `flush` sums them."""

    # Not summed at once: on XLA the first step of a window would then have another
    # graph than the others.

    def __init__(self, run: Run, state: State) -> None:
        self.run = run
        self.last_flush = state
        self.rows: list[dict[str, Tensor]] = []
        self.places: list[tuple[State, Plan]] = []
        self._restart_clock()

    def add(self, values: dict[str, Tensor], state: State, plan: Plan) -> None:
        """Keep the numbers of the step after `state`."""
        self.rows.append(values)
        self.places.append((state, plan))

    def flush(self, state: State, lr: float) -> State:
        """Log the means since the last flush; return the state with the time spent."""
        run = self.run
        steps = state.step - self.last_flush.step
        if not steps:
            return state
        values, cpu, teacher_images = self._means(steps)
        seconds = time.perf_counter() - self.clock
        # before the terms are checked: it reports non-finite outputs
        run.teacher.flush()
        skipped = 0
        in_a_row = 0
        if not all(map(math.isfinite, values.values())):
            values, skipped, in_a_row = self._applied_means()
        # only if some images have no label; see `Evaluator.training`
        labelled = values.pop("labelled", 1.0)
        if labelled != 1 and "accuracy" in values:
            accuracy = values.pop("accuracy")
            if labelled:
                values["accuracy"] = accuracy / labelled
        state = replace(
            state,
            seconds=state.seconds + seconds,
            cpu_seconds=state.cpu_seconds + cpu,
            skipped=in_a_row,
            skipped_in_all=state.skipped_in_all + skipped,
        )
        if run.skip_nonfinite:
            values["skipped"] = float(skipped)
        values["cpu_seconds"] = round(state.cpu_seconds, 3)
        values["lr"] = lr
        values["images_per_second"] = (state.images - self.last_flush.images) / seconds
        values |= {**run.backend.counters(), **run.window(state)}
        values["teacher_images"] = float(round(teacher_images))
        self.teacher_images = run.teacher.images
        run.store.log("train", state, values)
        run.logger.log("train", state, values)
        self.last_flush = state
        self.rows = []
        self.places = []
        return state

    def _means(self, steps: int) -> tuple[dict[str, float], float, float]:
        """Return the means, and the CPU seconds and teacher images of all ranks."""
        sums, *later_rows = self.rows
        for row in later_rows:
            sums = {name: sums[name] + value for name, value in row.items()}
        stacked = torch.stack([value.float() for value in sums.values()])
        cpu = max(0.0, cpu_seconds() - self.cpu_at_start)
        teacher_images = self.run.teacher.images - self.teacher_images
        of_rank = torch.tensor([cpu, teacher_images], device=stacked.device)
        with self.run.span("wait"):
            mean = self.run.backend.reduce_mean(torch.cat([stacked, of_rank]))
            *means, cpu, teacher_images = torch.cat(
                [mean[:-2] / steps, mean[-2:] * self.run.backend.world_size]
            ).tolist()
        return dict(zip(sums, means, strict=True)), cpu, teacher_images

    def _applied_means(self) -> tuple[dict[str, float], int, int]:
        """Return the applied steps' means, the skipped steps, and those at the end."""
        names = list(self.rows[0])
        table_SN = torch.stack(
            [torch.stack([row[name].float() for name in names]) for row in self.rows]
        )
        # only here: if all numbers are finite, one row is reduced
        table_SN = self.run.backend.reduce_mean(table_SN).cpu()
        wrong_SN = ~table_SN.isfinite()
        skipped_S = wrong_SN[:, names.index("grad_norm")] & self.run.skip_nonfinite
        in_a_row = self.last_flush.skipped
        longest = 0
        for skipped in skipped_S.tolist():
            in_a_row = in_a_row + 1 if skipped else 0
            longest = max(longest, in_a_row)
        fatal_SN = wrong_SN & ~skipped_S[:, None]
        reason = ""
        if longest > MOST_SKIPPED:
            fatal_SN = wrong_SN
            reason = f"; {longest} steps in a row were skipped, {MOST_SKIPPED} may be"
        if fatal_SN.any():
            fatal_N = fatal_SN.any(0).tolist()
            terms = [name for name, fatal in zip(names, fatal_N, strict=True) if fatal]
            rows = fatal_SN.any(1).nonzero()[:, 0].tolist()
            steps = [self.places[row][0].step + 1 for row in rows]
            raise diverged(terms, steps, self.places[rows[0]], reason)
        means = table_SN[~skipped_S].double().mean(0).tolist()
        values = {} if skipped_S.all() else dict(zip(names, means, strict=True))
        return values, int(skipped_S.sum()), in_a_row

    def log_epoch(self, state: State, plan: Plan, steps: int) -> None:
        """Log an epoch's plan: images trained, and the effective sample size."""
        # The time is the host's; there is no device sync.
        open_window = time.perf_counter() - self.clock if self.rows else 0.0
        weights_N = plan.weights.double()
        values = {
            "candidates": float(len(plan.ids)),
            "trained": float(steps * self.run.length.batch_size),
            "effective": float(weights_N.sum() ** 2 / (weights_N**2).sum()),
        }
        state = replace(state, seconds=state.seconds + open_window)
        self.run.store.log("epoch", state, values)

    def resume(self) -> None:
        """Leave out the time of evaluation and checkpoints, which train nothing."""
        if not self.rows:
            self._restart_clock()

    def _restart_clock(self) -> None:
        self.clock = time.perf_counter()
        self.cpu_at_start = cpu_seconds()
        self.teacher_images = self.run.teacher.images


def require_applied(state: State) -> None:
    """Require that at least half of a finished run's steps changed the weights."""
    if 2 * state.skipped_in_all > state.step:
        wrong = (
            f"{state.skipped_in_all} of {state.step} steps were skipped: their gradient"
            " was NaN or infinite"
        )
        raise NonFiniteLoss(
            "optimizer.on_nonfinite", wrong, "At most half of the steps", AFTER_SKIPPING
        )


class Diverged(NonFiniteLoss):
    """Non-finite terms in a step of this run."""

    at: tuple[State, Plan]  # the state before the first such step, and its epoch's plan


def diverged(
    terms: list[str], steps: list[int], at: tuple[State, Plan], reason: str = ""
) -> Diverged:
    """Return the error that names terms and steps."""
    text = f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
    if 1 < len(steps) == steps[-1] - steps[0] + 1:
        text = f"steps {steps[0]} to {steps[-1]}"
    config_path = "losses" if terms != ["grad_norm"] else "optimizer"
    wrong = f"{', '.join(terms)} became NaN or infinite in {text}{reason}"
    error = Diverged(config_path, wrong, "All terms must stay finite", AFTER_DIVERGING)
    error.at = at
    return error

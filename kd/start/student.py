"""The student's kernels and CPU threads, chosen by measurement at the start of a run."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from kd.config import Config
from kd.contracts import Backend, Teacher
from kd.engine.criterion import Distillation
from kd.engine.probe import fastest
from kd.models.classifier import compile_forward, set_attention
from kd.start.kernels import Effort, Kernel, Table, challenge, demanded, in_stages, options, trial_batch


def choose_student(
    config: Config,
    distillation: Distillation,
    teacher: Teacher,
    micro: int,
    backend: Backend,
    choices: dict[str, str],
    images: int = 0,
) -> tuple[Table, str]:
    """Set the fastest forward and backward of the student on `distillation` and `backend`; write it into `choices`.

    Args:
        config: of the run.
        distillation: student and criterion.
        teacher: answers for the trials.
        micro: images of a micro-batch.
        backend: where it runs.
        choices: what was chosen before; completed.
        images: how many this rank will train on; with none nothing is compiled to see whether it pays.

    Returns:
        The milliseconds measured, and a line for a person where compiling was tried, else "".

    Raises:
        ModelError: `student.compile` is on, or was chosen when the run began, and the student cannot be compiled.
    """
    batch = trial_batch(config, micro, backend)
    answers, trials = teacher(batch), {False: copy.deepcopy(distillation)}

    def step(name: str) -> torch.Tensor:
        compiled = Kernel.parse(name).compiled
        if compiled not in trials:
            trials[compiled] = copy.deepcopy(distillation)
        run_student(Kernel.parse(name), trials[compiled], backend)
        with backend.autocast():
            _, scores = trials[compiled](batch, answers)
        loss = scores["loss"].mean()
        loss.backward()
        trials[compiled].zero_grad()
        backend.end_step()
        return loss.detach()

    def work(name: str) -> Callable[[], torch.Tensor]:
        return lambda: step(name)

    pinned, asked = choices.get("student"), (config.backend.precision, config.student.attention)
    stages = options(*asked, pinned, backend.fixed_mode, distillation)
    name, table = in_stages(*stages, work, backend)
    table |= choose_threads(lambda: step(name), backend, choices)
    told = ""
    if Kernel.parse(pinned).compiled if pinned else config.student.compile == "on":
        name = f"{name}+compiled"
        demanded(work(name), "student.compile", f"'{name}' is asked for")
    elif not pinned and config.student.compile == "auto" and not backend.fixed_mode:
        effort = Effort(images, len(batch.label), table.get(name, 0.0))
        name, more, told = challenge(name, [f"{name}+compiled"], work, effort, backend)
        table |= more
    choices["student"] = name
    run_student(Kernel.parse(name), distillation, backend)
    return table, told


def run_student(kernel: Kernel, module: Distillation, backend: Backend) -> None:
    """Let student and backend compute with a kernel."""
    backend.autocast_dtype = torch.bfloat16 if kernel.precision == "bf16" else None
    set_attention(module, kernel.how == "fused")
    if kernel.compiled and module.student._compiled_call_impl is None:
        compile_forward(module.student)


def choose_threads(step: Callable[[], torch.Tensor], backend: Backend, choices: dict[str, str]) -> Table:
    """Set the number of CPU threads that makes a step fastest; write it into `choices`."""
    if not backend.thread_counts:
        return {}

    def work(threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        return step()

    counts = [int(choices["threads"])] if "threads" in choices else backend.thread_counts
    name, table = fastest({f"{n} threads": (lambda n=n: work(n)) for n in counts}, backend)
    choices["threads"] = name.split()[0]
    torch.set_num_threads(int(choices["threads"]))
    return table

"""How a model is run: kernels in turns, and compiled or exported forms where a run is long enough to try them.

Precision first, then attention at that precision: where the processor has no bfloat16 units, one bfloat16 step can take
as long as thirty others, and should be taken once only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from kd.config import Config
from kd.contracts import Backend
from kd.engine.probe import attempt, fastest, in_short, milliseconds
from kd.errors import KdError, ModelError
from kd.models.classifier import count_attention
from kd.models.runtime import RUNTIMES
from kd.types import Batch

QUANTIZED = ("int8", "fp8")
TRIAL_SECONDS = {"compiled": 60.0, "onnxruntime": 15.0, "openvino": 15.0}
"""What it costs to try a form, and to make it again where shapes change. Of a ViT-S at 224 px on two cores the frozen
forward compiles in 25 s, a student's step has a backward too; its export takes 9 s, then comes a session."""
TRIAL_SHARE = 0.01
"""Of the work that could be shortened, what a trial may cost: lost where it does not pay, won back five times by the
smallest gain that is taken."""
MARGIN = 0.05
"""Share of the time that a compiled or exported form must save to be taken."""
CPU_TRIAL = 16
"""Images of a trial on a CPU; an accelerator is tried with the whole micro-batch, which is what fills it."""

Table = dict[str, float]


@dataclass(frozen=True, slots=True)
class Kernel:
    """How a model is run. Its text is what the manifest records: `fp32+fused`, `bf16+unfused+compiled`,
    `int8+onnxruntime`.
    """

    precision: str
    how: str
    """The attention kernel of torch, or the runtime that runs an exported graph."""
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.precision}+{self.how}{'+compiled' if self.compiled else ''}"

    @classmethod
    def parse(cls, text: str) -> Kernel:
        """Read what `str` wrote."""
        precision, how, *rest = text.split("+")
        return cls(precision, how, bool(rest))

    @property
    def exported(self) -> bool:
        """Whether it is a graph outside torch."""
        return self.how in RUNTIMES

    @property
    def answers(self) -> str:
        """What the logits depend on beyond rounding; each quantizer rounds in its own way."""
        return f"{self.precision}+{'torch' if not self.exported else self.how}" if self.quantized else self.precision

    @property
    def remade(self) -> bool:
        """Whether it takes more than moving weights to make it."""
        return self.exported or self.quantized or self.compiled

    @property
    def key(self) -> str:
        """The configuration's key that names what is remade."""
        return "runtime" if self.exported else "compile" if self.compiled else "precision"

    @property
    def quantized(self) -> bool:
        """Whether it changes what a model says by more than a floating point format does."""
        return self.precision in QUANTIZED


@dataclass(frozen=True, slots=True)
class Effort:
    """What a run will ask of a model on this rank."""

    images: int
    """That it will be run on; 0: unknown, or none."""
    trial: int
    """Images of a trial."""
    milliseconds: float
    """Of a trial; 0: not measured yet."""

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.milliseconds / 1000 * self.images / self.trial


def worth_trying(work_seconds: float, form: str) -> bool:
    """Return whether a run is so long that a form may be tried: trying costs at most `TRIAL_SHARE` of its work."""
    return TRIAL_SECONDS[form] <= TRIAL_SHARE * work_seconds


def challenge(
    best: str,
    rivals: Sequence[str],
    work: Callable[[str], Callable[[], torch.Tensor]],
    effort: Effort,
    backend: Backend,
) -> tuple[str, Table, str]:
    """Let compiled and exported forms race against the best one in plain torch, where the run is long enough.

    Args:
        best: the fastest so far.
        rivals: names of the others; the last word of each is its form.
        work: makes, and so may compile or export, what a name stands for.
        effort: what the run will ask.
        backend: for the broadcasts.

    Returns:
        The winner, the milliseconds measured and a line for a person, empty where nothing was tried.
    """
    if not rivals or not effort.images:
        return best, {}, ""
    if not effort.milliseconds:
        effort = replace(effort, milliseconds=milliseconds(work(best), backend))
    runs, lines = {best: work(best)}, []

    def first(name: str) -> torch.Tensor:
        runs[name] = work(name)
        return runs[name]()

    for name in rivals:
        if worth_trying(effort.seconds, name.rpartition("+")[2]):
            reason = attempt(partial(first, name), backend)
            if reason:
                runs.pop(name, None)
                lines.append(f"{name} cannot be run here ({reason})")
    winner, table = fastest(runs, backend, margin=MARGIN, warm=True)
    lines += [f"{name} {table[best] / table[name]:.2f} times as fast as {best}" for name in runs if name != best]
    if not lines:
        return best, {}, ""
    asked = f", {100 * MARGIN:.0f} % are asked for" if winner == best and len(runs) > 1 else ""
    return winner, table, f"{winner}: {'; '.join(lines)}{asked} ({effort.trial} images, {effort.seconds:.0f} s of work)"


def demanded(work: Callable[[], torch.Tensor], where: str, wrong: str) -> None:
    """Do once what a configuration asks for by name.

    Args:
        work: the piece of work.
        where: config path that asked for it.
        wrong: how the message begins.

    Raises:
        KdError: it cannot be done.
    """
    allowed, remedy = "What this machine and this model can do", f"Set {where}=auto in a new run"
    try:
        work().sum().item()
    except KdError as error:
        if error.where.startswith("teacher."):
            raise
        raise type(error)(where, f"{wrong}, but {error.wrong}", allowed, remedy) from error
    except Exception as error:  # compilers and runtimes fail in their own ways
        raise ModelError(where, f"{wrong}, but {in_short(error)}", allowed, remedy) from error


def images_of(config: Config, num_images: int, batch_size: int, world_size: int) -> int:
    """Return how many images one rank trains on in the whole run, where nothing is sifted."""
    whole = config.run.steps * batch_size if config.run.steps else config.run.epochs * num_images
    return whole // world_size


def in_stages(
    precisions: Sequence[str],
    attentions: Sequence[str],
    work: Callable[[str], Callable[[], torch.Tensor]],
    backend: Backend,
) -> tuple[str, Table]:
    """Return the name `precision+attention` of the fastest and the milliseconds measured."""
    table: Table = {}
    best = f"{precisions[0]}+{attentions[0]}"
    for names in ([f"{p}+{attentions[0]}" for p in precisions], attentions):
        full = [name if "+" in name else f"{best.split('+')[0]}+{name}" for name in names]
        best, measured = fastest({name: work(name) for name in full}, backend)
        table |= measured
    return best, table


def options(
    precision: str, attention: str, pinned: str | None, fixed_mode: str, module: nn.Module
) -> tuple[list[str], list[str]]:
    """List the precisions and the attention kernels to try; one of each where nothing is left to choose."""
    if pinned:
        precision, attention = Kernel.parse(pinned).precision, Kernel.parse(pinned).how
    if attention == "auto" and not count_attention(module):
        attention = "unfused"  # no layer of this model has the other kernel
    settled = fixed_mode.split("+") if fixed_mode else []
    precisions = (settled[:1] or ["fp32", "bf16"]) if precision == "auto" else [precision]
    attentions = (settled[1:] or ["unfused", "fused"]) if attention == "auto" else [attention]
    return precisions, attentions


def trial_batch(config: Config, micro: int, backend: Backend) -> Batch:
    """Make a batch of noise with label 0."""
    count = min(micro, CPU_TRIAL) if backend.device.type == "cpu" else micro
    size = config.data.image_size
    image = torch.randint(256, (count, 3, size, size), dtype=torch.uint8).to(backend.device)
    return Batch.of(image, torch.zeros(count, dtype=torch.int64, device=image.device))

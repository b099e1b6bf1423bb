"""How a model is executed, and when a compiled or exported form is worth a trial.

Precision is chosen first, then the attention kernel at that precision: on a processor without bfloat16 units one
bfloat16 step can take as long as thirty others, and should run once only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kd.config.schema import QUANTIZED, RUNTIMES
from kd.contracts import Backend
from kd.errors import KdError, ModelError
from kd.models.classifier import count_attention
from kd.setup.trial import Table, Work, attempt, fastest, in_short, milliseconds

TRIAL_SECONDS = {"compiled": 60.0, "onnxruntime": 15.0, "openvino": 15.0}
"""What a trial of a form costs, with a second compilation where shapes change. A ViT-S at 224 px on two cores: its
frozen forward compiles in 25 s, its export takes 9 s, and a session is added."""
TRIAL_SHARE = 0.01
"""Of the work that could get faster, what a trial may cost."""
MARGIN = 0.05
"""Share of the plain candidate's time that another must save to be taken."""


@dataclass(frozen=True, slots=True)
class ExecutionMode:
    """How a model is executed. As text it is what the manifest records: `fp32+fused`, `bf16+unfused+compiled`,
    `int8+onnxruntime`.
    """

    precision: str
    backend: str
    """The attention kernel of torch, or the runtime of an exported graph."""
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.precision}+{self.backend}{'+compiled' if self.compiled else ''}"

    @classmethod
    def parse(cls, text: str) -> ExecutionMode:
        """Read what `str` wrote."""
        precision, backend, *rest = text.split("+")
        return cls(precision, backend, bool(rest))

    @property
    def exported(self) -> bool:
        """Whether it is a graph outside torch."""
        return self.backend in RUNTIMES

    @property
    def quantized(self) -> bool:
        """Whether it changes a model's outputs by more than a floating point format does."""
        return self.precision in QUANTIZED

    @property
    def numerics(self) -> str:
        """What the logits depend on beyond rounding; each quantizer rounds in its own way."""
        return f"{self.precision}+{self.backend if self.exported else 'torch'}" if self.quantized else self.precision

    @property
    def rebuilt(self) -> bool:
        """Whether making it takes more than moving weights."""
        return self.exported or self.quantized or self.compiled

    @property
    def key(self) -> str:
        """The configuration's key that asks for what is rebuilt."""
        return "runtime" if self.exported else "compile" if self.compiled else "precision"


@dataclass(frozen=True, slots=True)
class Workload:
    """What a run will ask of a model on this rank."""

    images: int
    """That it will run on; 0: unknown, or none."""
    trial: int
    """Images of a trial."""
    milliseconds: float
    """Of a trial; 0: not measured yet."""

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.milliseconds / 1000 * self.images / self.trial


def worth_trying(work_seconds: float, form: str) -> bool:
    """Return whether a run is so long that a form may be tried: a trial costs at most `TRIAL_SHARE` of its work."""
    return TRIAL_SECONDS[form] <= TRIAL_SHARE * work_seconds


def choose_plain(
    precision: str, attention: str, module: Any, work: Callable[[str], Work], backend: Backend
) -> tuple[str, Table]:
    """Return the name `precision+attention` of the fastest mode in plain torch, and the milliseconds measured.

    Args:
        precision: as configured; auto: float32 or bfloat16.
        attention: as configured; auto: fused or unfused.
        module: of which the attention layers are counted.
        work: makes the work that a name stands for.
        backend: with a fixed mode nothing is measured.
    """
    if attention == "auto" and not count_attention(module):
        attention = "unfused"  # no layer of this model has the other kernel
    fixed = backend.fixed_mode.split("+") if backend.fixed_mode else []
    precisions = (fixed[:1] or ["fp32", "bf16"]) if precision == "auto" else [precision]
    attentions = (fixed[1:] or ["unfused", "fused"]) if attention == "auto" else [attention]
    table: Table = {}
    best = f"{precisions[0]}+{attentions[0]}"
    for names in ([f"{p}+{attentions[0]}" for p in precisions], attentions):
        full = [name if "+" in name else f"{best.split('+')[0]}+{name}" for name in names]
        best, measured = fastest({name: work(name) for name in full}, backend, margin=MARGIN)
        table |= measured
    return best, table


def compare(
    best: str, candidates: Sequence[str], work: Callable[[str], Work], workload: Workload, backend: Backend
) -> tuple[str, Table, str]:
    """Compare compiled and exported forms with the best mode in plain torch, where the run is long enough.

    Args:
        best: the fastest so far.
        candidates: names of the others; the last word of each is its form.
        work: makes, and so may compile or export, what a name stands for.
        workload: what the run will ask.
        backend: for the broadcasts.

    Returns:
        The winner, the milliseconds measured and a line for a person, empty where nothing was tried.
    """
    if not candidates or not workload.images:
        return best, {}, ""
    if not workload.milliseconds:
        workload = replace(workload, milliseconds=milliseconds(work(best), backend))
    runs, lines = {best: work(best)}, []

    def first(name: str):
        runs[name] = work(name)
        return runs[name]()

    for name in candidates:
        if worth_trying(workload.seconds, name.rpartition("+")[2]):
            reason = attempt(partial(first, name), backend)
            if reason:
                runs.pop(name, None)
                lines.append(f"{name} cannot be run here ({reason})")
    winner, table = fastest(runs, backend, margin=MARGIN, warm=True)
    lines += [f"{name} {table[best] / table[name]:.2f} times as fast as {best}" for name in runs if name != best]
    if not lines:
        return best, {}, ""
    asked = f", {100 * MARGIN:.0f} % are required" if winner == best and len(runs) > 1 else ""
    size = f"{workload.trial} images, {workload.seconds:.0f} s of work"
    return winner, table, f"{winner}: {'; '.join(lines)}{asked} ({size})"


def require(work: Work, where: str, wrong: str) -> None:
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

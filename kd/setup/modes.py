"""How a model is executed: the fastest way that a configuration leaves open, found by timing.

Precision is chosen first, then the attention kernel at that precision: on a processor without bfloat16 units one
bfloat16 step can take as long as thirty others, and should run once only. Compiled and exported forms are tried last,
and only where the run is so long that the trial can pay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kd.config.schema import QUANTIZED, RUNTIMES
from kd.contracts import Backend
from kd.errors import KdError, ModelError
from kd.models.classifier import count_attention
from kd.setup.trial import Work, attempt, fastest, in_short, milliseconds

TRIAL_SECONDS = {"compiled": 60.0, "onnxruntime": 15.0, "openvino": 15.0}
"""What a trial of a form costs, with a second compilation where shapes change. A ViT-S at 224 px on two cores: its
frozen forward compiles in 25 s, its export takes 9 s, and a session is added."""
TRIAL_SHARE = 0.01  # of the work that could get faster, what a trial may cost
MARGIN = 0.05  # share of the plain candidate's time that another must save to be taken

log = logging.getLogger("kd")


@dataclass(frozen=True, slots=True)
class ExecutionMode:
    """How a model is executed. As text it is what the manifest records: `fp32+fused`, `bf16+unfused+compiled`,
    `int8+onnxruntime`.
    """

    precision: str
    kernel: str  # the attention kernel of torch, or the runtime of an exported graph
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.precision}+{self.kernel}{'+compiled' if self.compiled else ''}"

    @classmethod
    def parse(cls, text: str) -> ExecutionMode:
        precision, kernel, *rest = text.split("+")
        known = precision in ("fp32", "bf16", *QUANTIZED) and kernel in ("fused", "unfused", *RUNTIMES)
        if not known or rest not in ([], ["compiled"]):
            raise ValueError(f"no execution mode '{text}'")
        return cls(precision, kernel, bool(rest))

    @property
    def plain(self) -> bool:
        """Whether it is torch in float32: nothing to compare."""
        return self.precision == "fp32" and not self.rebuilt

    @property
    def exported(self) -> bool:
        """Whether it is a graph outside torch."""
        return self.kernel in RUNTIMES

    @property
    def quantized(self) -> bool:
        """Whether it changes a model's outputs by more than a floating point format does."""
        return self.precision in QUANTIZED

    @property
    def numerics(self) -> str:
        """Part of the cache's identity: modes with equal `numerics` give equal logits up to rounding."""
        return f"{self.precision}+{self.kernel}" if self.quantized else self.precision

    @property
    def rebuilt(self) -> bool:
        """Whether making it takes more than moving weights."""
        return self.exported or self.compiled

    @property
    def form(self) -> str:
        """The compiler or runtime, as `TRIAL_SECONDS` names it."""
        return "compiled" if self.compiled else self.kernel

    @property
    def key(self) -> str:
        """Config key that selects this mode: runtime or compile."""
        return "runtime" if self.exported else "compile"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a configuration leaves open for one model."""

    precision: str  # auto: float32 or bfloat16
    attention: str  # auto: fused or unfused
    compile: str
    module: Any  # whose attention layers are counted
    exported: Sequence[ExecutionMode] = ()  # graphs that may be compared with torch
    rebuilt: bool = True  # whether compiled and exported forms may be tried


@dataclass(frozen=True, slots=True)
class Chosen:
    """How a model is executed, and what was measured."""

    mode: ExecutionMode
    table: Mapping[ExecutionMode, float] = field(default_factory=dict)
    """Milliseconds of each candidate; empty where nothing was measured."""
    summary: str = ""  # for a person, where a compiler or a runtime was tried; else ""

    @property
    def record(self) -> dict[str, float]:
        return {str(mode): ms for mode, ms in self.table.items()}


@dataclass(frozen=True, slots=True)
class Workload:
    """What a run will ask of a model on this rank."""

    images: int  # that it will run on; 0: unknown, or none
    trial: int  # images of a trial

    def seconds(self, milliseconds: float) -> float:
        """Return the seconds of the whole run, where a trial takes so long."""
        return milliseconds / 1000 * self.images / self.trial


def choose_mode(wanted: Wanted, work: Callable[[ExecutionMode], Work], workload: Workload, backend: Backend) -> Chosen:
    """Return the fastest mode; a mode that is asked for by name is not compared."""
    best, table = _plain(wanted, work, backend)
    if wanted.compile == "on":
        return Chosen(replace(best, compiled=True), table)
    forms = [*wanted.exported, *([replace(best, compiled=True)] if wanted.compile == "auto" else [])]
    if not forms or not workload.images or not wanted.rebuilt or backend.fixed_mode:
        return Chosen(best, table)
    found = _compare(best, forms, table.get(best, 0.0), work, workload, backend)
    return replace(found, table={**table, **found.table})


def _plain(
    wanted: Wanted, work: Callable[[ExecutionMode], Work], backend: Backend
) -> tuple[ExecutionMode, dict[ExecutionMode, float]]:
    """Return the fastest mode in plain torch, and the milliseconds measured."""
    attention = wanted.attention
    if attention == "auto" and not count_attention(wanted.module):
        attention = "unfused"  # no layer of this model has the other kernel
    fixed = ExecutionMode.parse(backend.fixed_mode) if backend.fixed_mode else None
    precisions = [wanted.precision]
    if wanted.precision == "auto":
        precisions = [fixed.precision] if fixed else ["fp32", "bf16"]
    attentions = [attention]
    if attention == "auto":
        attentions = [fixed.kernel] if fixed else ["unfused", "fused"]
    modes = [ExecutionMode(precision, attentions[0]) for precision in precisions]
    best, table = fastest({mode: work(mode) for mode in modes}, backend, margin=MARGIN)
    modes = [replace(best, kernel=kernel) for kernel in attentions]
    best, more = fastest({mode: work(mode) for mode in modes}, backend, margin=MARGIN)
    return best, table | more


def _compare(
    best: ExecutionMode,
    forms: Sequence[ExecutionMode],
    best_ms: float,
    work: Callable[[ExecutionMode], Work],
    workload: Workload,
    backend: Backend,
) -> Chosen:
    """Compare compiled and exported forms with the best mode in plain torch; `best_ms` is 0 if not measured yet."""
    seconds = workload.seconds(best_ms or milliseconds(work(best), backend))
    runs, lines = {best: work(best)}, []

    def first(mode: ExecutionMode):
        runs[mode] = work(mode)
        return runs[mode]()

    for mode in forms:
        if TRIAL_SECONDS[mode.form] <= TRIAL_SHARE * seconds:
            reason = attempt(partial(first, mode), backend)
            if reason:
                runs.pop(mode, None)
                lines.append(f"{mode} cannot be run here ({reason})")
    winner, table = fastest(runs, backend, margin=MARGIN, warm=True)
    lines += [f"{mode} {table[best] / table[mode]:.2f} times as fast as {best}" for mode in runs if mode != best]
    if not lines:
        return Chosen(best)
    margin = f", {100 * MARGIN:.0f} % are required" if winner == best and len(runs) > 1 else ""
    size = f"{workload.trial} images, {seconds:.0f} s of work"
    return Chosen(winner, table, f"{winner}: {'; '.join(lines)}{margin} ({size})")


def require(work: Work, where: str, mode: ExecutionMode) -> None:
    """Do once what is asked for by name; what cannot be compiled is tried again without earlier libraries."""
    wrong, allowed = f"'{mode}' is asked for", "What this machine and this model can do"
    remedy = f"Set {where}=auto in a new run"
    try:
        try:
            work().sum().item()
        except KdError:
            raise
        except Exception as error:
            if not mode.compiled:
                raise
            from kd.models.compiled import clear_libraries  # only where a compiler is used

            log.warning(f"{where}: {in_short(error)}. What was compiled before is removed; it is compiled once more.")
            clear_libraries()
            work().sum().item()
    except KdError as error:
        if error.where.startswith("teacher."):
            raise
        raise type(error)(where, f"{wrong}, but {error.wrong}", allowed, remedy) from error
    except Exception as error:  # compilers and runtimes fail in their own ways
        raise ModelError(where, f"{wrong}, but {in_short(error)}", allowed, remedy) from error

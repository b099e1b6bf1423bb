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

import torch

from kd.config.schema import QUANTIZED, RUNTIMES
from kd.core.contracts import Backend
from kd.core.errors import KdError, ModelError
from kd.models.classifier import count_attention
from kd.setup.trial import Work, attempt, fastest, in_short, milliseconds, of_rank_0

TRIAL_SECONDS = {"compiled": 60.0, "onnxruntime": 15.0, "openvino": 15.0}
"""What a trial of a form costs. Training steps of nine networks compile in 29 to 203 s on one busy core
(`compile_*.csv`); a ViT-S is exported in 9 s, and a session is added."""
KNOWN_SECONDS = 10.0
"""What a compiled form costs where its libraries lie here, from an earlier run: they are loaded in 1 to 8 s."""
TRIAL_SHARE = 0.04  # of the work that could get faster, what a trial may cost
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
    trial: int  # images of a trial in plain torch
    whole: int  # images of a step: other forms are tried with these, since each shape is compiled anew
    size: int = 0  # pixels a side

    def seconds(self, milliseconds: float) -> float:
        """Return the seconds of the whole run, where a trial takes so long."""
        return milliseconds / 1000 * self.images / self.trial


WorkOf = Callable[[ExecutionMode, int], Work]
"""Returns the work on so many images in a mode."""


def choose_mode(wanted: Wanted, work: WorkOf, workload: Workload, backend: Backend) -> Chosen:
    """Return the fastest mode; a mode that is asked for by name is not compared."""
    best, table = _plain(wanted, lambda mode: work(mode, workload.trial), backend)
    if wanted.compile == "on":
        return Chosen(replace(best, compiled=True), table)
    forms = [*wanted.exported, *([replace(best, compiled=True)] if wanted.compile == "auto" else [])]
    if not forms or not workload.images or not wanted.rebuilt or backend.fixed_mode:
        return Chosen(best, table)
    seconds = workload.seconds(table.get(best) or milliseconds(work(best, workload.trial), backend))
    tried = [mode for mode in forms if _shortest(mode, wanted.module, workload, backend, seconds) <= seconds]
    if not tried:
        return Chosen(best, table)
    found = _compare(best, tried, lambda mode: work(mode, workload.whole), backend)
    for mode in found.table:
        if mode.compiled:
            from kd.models.compiled import note_compiled  # only where a compiler is used

            note_compiled(_name(mode, wanted.module, workload, backend))
    size = f"{workload.whole} images, {seconds:.0f} s of work"
    return replace(found, table={**table, **found.table}, summary=f"{found.summary} ({size})")


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


def _shortest(mode: ExecutionMode, module: Any, workload: Workload, backend: Backend, seconds: float) -> float:
    """Return how many seconds of work a trial needs to pay; `seconds`: those of the run."""
    cost = TRIAL_SECONDS[mode.form]
    if mode.compiled and KNOWN_SECONDS <= TRIAL_SHARE * seconds < cost:
        from kd.models.compiled import compiled_before  # only where a compiler is used

        known = compiled_before(_name(mode, module, workload, backend))
        cost = KNOWN_SECONDS if of_rank_0([float(known)], backend)[0] else cost
    return cost / TRIAL_SHARE


def _name(mode: ExecutionMode, module: Any, workload: Workload, backend: Backend) -> str:
    """Return what a compiled step depends on, as text."""
    threads = torch.get_num_threads()
    return f"{torch.__version__} {backend.device} {threads} {mode} {workload.whole} x {workload.size} {module!r}"


def _compare(
    best: ExecutionMode, forms: Sequence[ExecutionMode], work: Callable[[ExecutionMode], Work], backend: Backend
) -> Chosen:
    """Compare compiled and exported forms with the best mode in plain torch."""
    runs, lines = {best: work(best)}, []

    def first(mode: ExecutionMode):
        runs[mode] = work(mode)
        return runs[mode]()

    for mode in forms:
        reason = attempt(partial(first, mode), backend)
        if reason:
            runs.pop(mode, None)
            lines.append(f"{mode} cannot be run here ({reason})")
    winner, table = fastest(runs, backend, margin=MARGIN, warm=True)
    lines += [f"{mode} {table[best] / table[mode]:.2f} times as fast as {best}" for mode in runs if mode != best]
    margin = f", {100 * MARGIN:.0f} % are required" if winner == best and len(runs) > 1 else ""
    return Chosen(winner, table, f"{winner}: {'; '.join(lines)}{margin}")


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

"""How a model is executed: as the configuration names it, and where it says `auto` by facts of the machine alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kd.config.schema import QUANTIZED, RUNTIMES
from kd.core.contracts import Backend
from kd.core.errors import KdError, ModelError
from kd.models.classifier import count_attention

log = logging.getLogger("kd")

Work = Callable[[], torch.Tensor]  # does a piece of work once and returns a tensor that is waited for


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
        """Return the mode of such a text."""
        precision, kernel, *compiled = text.split("+")
        return cls(precision, kernel, bool(compiled))

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
    def key(self) -> str:
        """Config key that selects this mode: runtime or compile."""
        return "runtime" if self.exported else "compile"


def torch_mode(precision: str, attention: str, compiled: bool, module: Any, backend: Backend) -> ExecutionMode:
    """Return the mode of a module in torch; `auto` means `Backend.auto_mode`, on all ranks that of rank 0."""
    own_precision, own_kernel = backend.auto_mode.split("+")
    half = torch.tensor([float(own_precision == "bf16")], device=backend.device)
    backend.broadcast_([half])
    precision = ("bf16" if half.item() else "fp32") if precision == "auto" else precision
    if attention == "auto":  # a module without such a layer has one kernel
        attention = own_kernel if count_attention(module) else "unfused"
    return ExecutionMode(precision, attention, compiled)


def require(work: Work, where: str, mode: ExecutionMode) -> None:
    """Do once what is asked for by name; what cannot be compiled is tried again without earlier libraries."""
    wrong, allowed = f"'{mode}' is asked for", "What this machine and this model can do"
    remedy = f"Set {where}={'off' if mode.compiled else 'auto'} in a new run"
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


def in_short(error: Any) -> str:
    """Return the message of an error, short enough for one line."""
    if isinstance(error, KdError):
        return error.wrong
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]

"""Where the host waits for the device, counted on a CPU: reads of tensors by the
functions that `train` calls.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kd

OURS = (  # a clone may be called kd too, with its packages below
    f"{Path(kd.__file__).parent}{os.sep}"
)
WAITS = {
    "aten._local_scalar_dense.default",
    "aten.is_nonzero.default",
    "aten.equal.default",
    "aten.nonzero.default",
}
"""Operators whose result the host reads, so that it waits for the device."""
COPIES = {
    "cpu",
    "tolist",
    "numpy",
    "item",
    "__bool__",
    "__int__",
    "__float__",
    "__array__",
}
"""Methods of a tensor that copy it to the host; on a CPU some of them call no
operator.
"""


class Reads:
    """Record which functions of `kd` wait for the device, as file:function."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def note(self) -> None:
        frame = sys._getframe(2)
        places = list[str]()
        while frame is not None:
            if frame.f_code.co_filename.startswith(OURS):
                places.append(
                    f"{Path(frame.f_code.co_filename).stem}:{frame.f_code.co_name}"
                )
            frame = frame.f_back
        if "loop:_train" in places:  # not while a run is set up
            self.found.append(places[0])

    def __enter__(self) -> Reads:
        reads = self

        class Operators(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if str(func) in WAITS:
                    reads.note()
                return func(*args, **(kwargs or {}))

        class Methods(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                if getattr(func, "__name__", "") in COPIES:
                    reads.note()
                return func(*args, **(kwargs or {}))

        self.modes = ExitStack()
        self.modes.enter_context(Operators())
        self.modes.enter_context(Methods())
        return self

    def __exit__(self, *error) -> None:
        self.modes.close()


AT_POINTS = {
    "meter:_means",  # a log point
    "meter:log_epoch",
    "single_label:_finish",  # an evaluation
    "ranks:gather_numbers",  # a start, an evaluation
    "snapshot:snapshot",  # a checkpoint
    "_ddp:barrier",
}
ONCE_AN_EPOCH = {
    "_table:_gather",
    "_table:_sifted",
    "history:_split",
    "build:<lambda>",
}  # the plan
HOST = {
    "loader:requests",
    "loader:_arriving_batches",
    "cache:_with_stored_outputs",
    "cache:<listcomp>",
    "views:cut",
}
"""These read tensors that the host has: ids of a plan, images, batches that were not
sent yet.
"""


def train_two_ranks(argv: list[str]) -> int:
    """Train as a rank does, and print the functions that waited."""
    from kd.cli.training import train

    with Reads() as reads:
        code = train(argv)
    print(f"WAITED {' '.join(sorted(set(reads.found)))}")
    return code

"""How much of the machine a distillation step uses: its arithmetic against the measured
rate of matrix products.

Run: python benchmarks/mfu.py [--teacher vit_base_patch16_224] [--batch 16] [--rounds 5] [--precision bf16] [--compile]

On ready tensors, on the GPU where there is one, else on the CPU; kernels in turns. The
arithmetic (two for a multiply and an add) is counted by torch's FlopCounterMode in
unfused attention and is the same for each kernel. The rate is the best of square
products of that precision. `cached`: the student's step alone, its target at hand.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from _record import write
from kd.core.types import Batch, Outputs
from kd.engine.criterion import Criterion, StudentWithLoss
from kd.models.classifier import set_attention
from kd.models.compiled import compile_forward
from kd.models.live_teacher import LiveTeacher
from kd.models.load_classifier import load
from kd.models.spec import Spec
from kd.parts.tasks.single_label import SingleLabel
from kd.setup.student import loss_term

CLASSES = [str(i) for i in range(101)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def matrix_rate(
    device: torch.device, dtype: torch.dtype, sizes: Sequence[int] = ()
) -> float:
    """Return the arithmetic a second of square matrix products, the best of three
    sizes, each the median of five.
    """
    rates = []
    for size in sizes or (
        (4096, 8192, 16384) if device.type == "cuda" else (1024, 2048, 4096)
    ):
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        times = []
        for _ in range(6):
            wait(device)
            start = time.perf_counter()
            torch.mm(a, b)
            wait(device)
            times.append(time.perf_counter() - start)
        rates.append(2 * size**3 / statistics.median(times[1:]))
    return max(rates)


class Step:
    """Teacher and student of one attention kernel."""

    def __init__(
        self, options: argparse.Namespace, kernel: str, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.dtype = DTYPES[options.precision]
        big = load(
            Spec("teacher", options.teacher, options.teacher_args, CLASSES),
            options.size,
        )
        small = load(
            Spec("student", options.student, options.student_args, CLASSES),
            options.size,
        )
        self.teacher = LiveTeacher(big, device, self.dtype)
        self.module = StudentWithLoss(
            copy.deepcopy(small),
            Criterion([loss_term("kl", temperature=2.0)]),
            SingleLabel(),
        ).to(device)
        for model in (self.teacher.model, self.module):
            set_attention(model, kernel.startswith("fused"))
            if kernel.endswith("compiled"):
                compile_forward(model)
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=1e-4, fused=True
        )
        image = torch.randint(
            256,
            (options.batch, 3, options.size, options.size),
            dtype=torch.uint8,
            device=device,
        )
        self.batch = Batch.of(
            image, torch.zeros(options.batch, dtype=torch.int64, device=device)
        )
        self.target = self.teacher(self.batch)

    def ask(self) -> Outputs:
        """Run the teacher's forward."""
        return self.teacher(self.batch)

    def learn(self, target: Outputs) -> None:
        """Make the student's step."""
        with torch.autocast(
            self.device.type, self.dtype, enabled=self.dtype != torch.float32
        ):
            loss = self.module(self.batch, target)[1]["loss"].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def works(self) -> dict[str, Callable[[], object]]:
        """Return what is timed, by name."""
        return {
            "teacher": self.ask,
            "cached": lambda: self.learn(self.target),
            "live": lambda: self.learn(self.ask()),
        }


def counted(work: Callable[[], object]) -> int:
    """Return the arithmetic of a piece of work."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def measure(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each kernel, piece of work and round; print the medians."""
    kernels = ["unfused", "fused", *(["fused+compiled"] if options.compile else [])]
    steps = {kernel: Step(options, kernel, device) for kernel in kernels}
    flops = {name: counted(work) for name, work in steps["unfused"].works().items()}
    rate = matrix_rate(device, DTYPES[options.precision], options.sizes)
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(options.rounds + 1):
        for kernel, step in steps.items():
            for name, work in step.works().items():
                wait(device)
                start = time.perf_counter()
                work()
                wait(device)
                if turn:
                    times.setdefault((kernel, name), []).append(
                        time.perf_counter() - start
                    )
    print(
        f"{device}, {options.precision}, batch {options.batch}: matrix products"
        f" {rate / 1e9:.0f} GFLOP/s"
    )
    rows = []
    for (kernel, name), samples in times.items():
        seconds = statistics.median(samples)
        share_of_rate = flops[name] / seconds / rate
        print(
            f"{kernel:8s} {name:8s} {options.batch / seconds:9.1f} images/s,"
            f" {100 * share_of_rate:5.1f} % of the matrix rate"
        )
        fixed = {
            "kernel": kernel,
            "work": name,
            "gflop": float(f"{flops[name] / 1e9:.5g}"),
            "gflops": round(rate / 1e9, 1),
        }
        rows += [
            {**fixed, "round": i, "ms": round(1000 * sample, 2)}
            for i, sample in enumerate(samples)
        ]
    return rows


def arguments() -> argparse.ArgumentParser:
    """Return what the command takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teacher", default="vit_base_patch16_224")
    parser.add_argument("--student", default="vit_tiny_patch16_224")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument(
        "--batch", type=int, default=0, help="0: 256 on a GPU, 16 on a CPU"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--precision",
        choices=DTYPES,
        default="bf16" if torch.cuda.is_available() else "fp32",
    )
    parser.add_argument(
        "--compile", action="store_true", help="the fused kernels compiled too"
    )
    parser.set_defaults(teacher_args={}, student_args={}, sizes=())
    return parser


def main() -> None:
    """Measure and write the CSV."""
    options = arguments().parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.batch = options.batch or (256 if device.type == "cuda" else 16)
    write(
        "mfu",
        " ".join(["python benchmarks/mfu.py", *sys.argv[1:]]),
        measure(options, device),
    )


if __name__ == "__main__":
    main()

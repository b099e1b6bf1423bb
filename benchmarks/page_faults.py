"""What it saves that a run on a CPU keeps the memory that it frees
(`kd.core.host.keep_freed_memory`).

Run: python benchmarks/page_faults.py [--rounds 3] [--teachers vit_base_patch16_224] [--batch 32] [--precision bf16]

The parts of `mfu.py` with unfused attention, in processes that take turns: glibc's own
way and kd's. A row has the median milliseconds and page faults of a piece of work, and
the peak memory of its process. Only on a CPU, with glibc.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from mfu import Step, arguments

from _record import write
from kd.core.host import keep_freed_memory

WARM = 2
TIMES = 5


def measure(options: argparse.Namespace) -> None:
    """Print a row for each piece of work of this process."""
    if options.way == "kd":
        assert keep_freed_memory(), "this machine's allocator cannot be told"
    step = Step(options, "unfused", torch.device("cpu"))
    for name, work in step.works().items():
        for _ in range(WARM):
            work()
        times = []
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(TIMES):
            start = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - start))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        row = {
            "ms": round(statistics.median(times), 1),
            "faults": (usage.ru_minflt - before) // TIMES,
        }
        print(
            "ROW",
            json.dumps({"work": name, **row, "peak_mib": usage.ru_maxrss // 1024}),
        )


def main() -> None:
    """Measure in turns and write the CSV."""
    parser = arguments()
    parser.description = __doc__
    parser.add_argument(
        "--teachers",
        nargs="*",
        default=["vit_base_patch16_224", "vit_small_patch16_224"],
    )
    parser.add_argument(
        "--way", choices=("glibc", "kd"), help="measure in this process, and print"
    )
    parser.set_defaults(batch=32, rounds=3)
    options = parser.parse_args()
    if options.way:
        return measure(options)
    rows = []
    for number in range(options.rounds):
        for teacher in options.teachers:
            for way in ("glibc", "kd"):
                argv = [
                    "--teacher",
                    teacher,
                    "--way",
                    way,
                    "--batch",
                    str(options.batch),
                    "--precision",
                    options.precision,
                ]
                child = [sys.executable, __file__, *argv]
                text = subprocess.run(
                    child, check=True, stdout=subprocess.PIPE, text=True
                ).stdout
                for line in text.splitlines():
                    if line.startswith("ROW "):
                        rows.append(
                            {
                                "round": number,
                                "teacher": teacher,
                                "way": way,
                                **json.loads(line[4:]),
                            }
                        )
                        print(*rows[-1].values(), flush=True)
    write(
        "page_faults",
        " ".join(["python benchmarks/page_faults.py", *sys.argv[1:]]),
        rows,
    )


if __name__ == "__main__":
    main()

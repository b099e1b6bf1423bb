"""The search for the largest batch: against trying every size, with real allocations and real refusals."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap

import pytest
import torch

from kd import parts
from kd.backends.cpu import CPU
from kd.errors import ConfigError
from kd.setup.batch import largest

MODULE = parts.find("backends", "cpu", "test")


class Refusing(CPU):
    """A device that says so when it is full, as accelerators do; here the allocator refuses what cannot exist."""

    def free_mib(self) -> float:
        return math.inf


def world() -> Refusing:
    made = Refusing("fp32", 5.0, threads=1)
    made.setup()
    return made


def up_to(limit: int):
    """Return a trial that fits up to so many images and then really runs out of memory."""
    return lambda size: torch.empty(size if size <= limit else 2**60)


@pytest.mark.parametrize(("limit", "most", "expected"), [(100, 200, 64), (64, 200, 64), (1000, 36, 32), (1, 3, 1)])
def test_the_largest_power_of_two_that_is_executed(limit, most, expected):
    found = largest(up_to(limit), most, world())
    assert found.size == expected
    assert f"{expected} fits" in found.summary


def test_not_even_one_image():
    with pytest.raises(ConfigError, match=r"data\.batch_size: is auto, but not even one image fits"):
        largest(up_to(0), 2, world())


def test_another_error_is_not_taken_for_a_full_memory():
    def broken(size: int) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        largest(broken, 8, world())


def alone(script: str) -> list[str]:
    """Run a script in a process of its own, whose peak memory is its own, and return what it printed."""
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="counts resident pages as Linux does")
def test_what_an_image_costs_is_measured():
    # three MiB an image, touched and given back
    each = alone("""
        import torch
        from kd.setup.batch import per_image
        print(per_image(lambda size: torch.ones(size * 3 * 2**18).sum().item(), 4096))
        print(per_image(lambda size: None, 64))
    """)
    assert float(each[0]) == pytest.approx(3, rel=0.1)
    assert float(each[1]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_on_a_cpu_the_arithmetic_stays_within_the_process_own_limit():
    # 1,200 MiB more than now: 0.8 of it at 3 MiB an image is 320 images
    printed = alone("""
        import resource, torch
        from kd import parts
        from kd.setup.batch import largest
        module = parts.find("backends", "cpu", "test")
        backend = module.build(module.Options(threads=1), precision="fp32", timeout_seconds=5.0)
        import accelerate.utils
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 1200 * 2**20,) * 2)
        sizes = []
        def trial(size):
            sizes.append(size)
            torch.ones(size * 3 * 2**18).sum().item()
        print(largest(trial, 100_000, backend).size, max(sizes), round(backend.free_mib()))
        trial(256)
        try:
            trial(512)
        except RuntimeError:
            print("refused")
    """)
    assert printed[0] == "256"
    assert int(printed[1]) < 128  # nothing large was tried
    assert 1000 < int(printed[2]) < 1300  # what the trials gave back is free too
    assert printed[3] == "refused"

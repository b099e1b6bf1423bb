"""The times that `--check` prints: each part of a step is timed with as many images as
surely fit, and then scaled.
"""

import re

import pytest
import torch

from kd import config
from kd.config import instances
from kd.core.facts import BackendFacts
from kd.core.text import format_seconds as spoken
from kd.jobs import estimate, stopwatch
from kd.jobs.forecast import forecast
from kd.jobs.stopwatch import time_work
from kd.parts.backends.cpu import CPU
from kd.setup.build import distributed
from kd.setup.data import open_sources
from kd.setup.recipe import resolve
from kd.study.paying import AIM, ENOUGH


class Clock:
    """A clock that work moves: no comparison depends on what else the machine does."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-9  # no work takes no time at all
        return self.now

    def process_time(self) -> float:
        """Both of two cores work all the time."""
        return 2 * self.now

    def working(self, seconds):
        """Return work that takes so long, a number or what returns one."""

        def work() -> torch.Tensor:
            self.now += seconds() if callable(seconds) else seconds
            return torch.ones(1)

        return work


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    return clock


def test_a_first_call_that_compiles_is_not_measured(clock):
    first_call = iter([0.7])  # lost, if it were measured
    assert time_work(
        lambda images: clock.working(lambda: next(first_call, 0.005)), 1, 1
    ).ms == pytest.approx(5)


def test_a_check_names_what_the_sifter_saves_and_times_no_other_setting(settings):
    settings["sifter"] = {"kind": "history"}
    lines = forecast(resolve(config.load(settings)), everything=True).splitlines()
    assert any(line.startswith("sifter    'history' ") for line in lines)
    assert not any(line.startswith("keys") for line in lines)


@pytest.mark.parametrize(
    ("overhead", "each", "largest", "tried"),
    [
        (0.1, 0.001, 64, [2, 39, 64]),  # a micro-batch
        (0.0, 0.01, 1024, [2, 199]),  # which take all of the time
        (0.0, 2.0, 1024, [2]),  # a network whose smallest step bursts the budget
        (0.0, 2.0, 1, [1]),
    ],
)
def test_a_part_is_timed_with_a_micro_batch_that_fits_the_time(
    clock, overhead, each, largest, tried
):
    sizes = []

    def make(images: int):
        sizes.append(images)
        return clock.working(overhead + each * images)

    timing = time_work(make, largest, min(2, largest))
    assert sizes == tried
    assert timing.images == tried[-1]
    assert timing.ms == pytest.approx(1000 * (each + overhead / timing.images))
    assert timing.cpu_ms == pytest.approx(2 * timing.ms)
    trials = [overhead + each * images for images in tried]
    assert clock.now <= 2 * sum(trials) + stopwatch.TRIAL_SECONDS + trials[-1]


def counted(module, clock, overhead: float, each: float) -> list[int]:
    """Let each forward of real pixels take so long; return the numbers of their
    images.
    """
    images = []

    def forward(module, inputs):
        if type(inputs[0]) is torch.Tensor and not inputs[0].is_meta:
            images.append(len(inputs[0]))
            clock.now += overhead + each * len(inputs[0])

    module.register_forward_pre_hook(forward)
    return images


def test_the_students_step_is_timed_as_the_run_makes_it_however_slow_the_teacher(
    settings, clock
):
    """16 images took 1.6 times as long each as the 64 of a step, where the teacher was
    slow: 505 steps for 887.
    """
    steps = {}
    for slow in (0.001, 1.0):
        recipe = resolve(
            config.load(settings, ["data.batch_size=32", "run.baseline=true"])
        )
        with distributed(recipe.backend) as backend:
            bench = estimate.Bench.of(recipe, open_sources(recipe.data), backend)
            counted(bench.distillation.student, clock, 0.02, 0.001)
            counted(bench.live.model, clock, 0.0, slow)
            timings = estimate.measure(bench)
        steps[slow] = timings["step"]
        assert timings["teacher"].ms == pytest.approx(1000 * slow)
    assert steps[0.001] == pytest.approx(steps[1.0])
    assert steps[1.0].images == 32
    assert steps[1.0].ms == pytest.approx(1 + 20 / 32)
    lines = estimate.estimate(bench, timings)
    alone = next(line for line in lines if line.startswith("baseline"))
    run = bench.plan_run(recipe)
    cost = (
        run.images
        * run.epochs
        * (timings["step"].cpu_ms + timings["teacher"].cpu_ms + timings["load"].cpu_ms)
        / 1000
    )
    assert f"at most {spoken(AIM * cost)}, fit and distillation {spoken(cost)}" in alone
    assert not any("scaled" in line for line in lines)


def test_measuring_a_fit_leaves_the_mode_of_the_student(settings, monkeypatch):
    """A student of convolutions was timed in the bfloat16 of its teacher's fit: 756 ms
    an image for 6.
    """
    monkeypatch.setattr(CPU, "auto_mode", property(lambda backend: "bf16+unfused"))
    monkeypatch.setattr(
        CPU, "bf16_pays", lambda backend, made_of, trained: made_of()[0] < 0.5
    )
    settings["student"] = {"model": "resnet10t"}
    settings["teacher"] = {
        **settings["teacher"],
        "model": "vit_tiny_patch16_224",
        "fit": {"epochs": 1},
    }
    recipe = resolve(config.load(settings, ["backend.precision=auto"]))
    with distributed(recipe.backend) as backend:
        bench = estimate.Bench.of(recipe, open_sources(recipe.data), backend)
        assert backend.autocast_dtype is None
        assert estimate.measure(bench)["fit"].images > 0
        assert backend.autocast_dtype is None


SLOW = """
import torch

class Slow(torch.nn.Module):
    '''A network of which a test says how long its forward takes.'''

    made = []

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 12)
        self.made.append(self)

    def forward(self, pixels):
        return self.head(pixels.mean((2, 3)))

def slow():
    return Slow()
"""


def test_a_check_of_a_slow_network_and_a_large_batch_looks_at_few_images(
    settings, clock, tmp_path, monkeypatch
):
    """ViT-B at a batch of 1,024 had not ended after 290 s; here an image takes three
    seconds, and nothing is timed.
    """
    (tmp_path / "slow_network.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    import slow_network  # type: ignore[import-not-found]

    student = {
        "kind": "torch",
        "model": "slow_network:slow",
        "mean": [0, 0, 0],
        "std": [1, 1, 1],
    }
    data = {
        "kind": "food_mini",
        "root": str(tmp_path / "food"),
        "image_size": 16,
        "batch_size": 1024,
    }
    images = []
    forward = slow_network.Slow.forward

    def counting(self, pixels):
        if type(pixels) is torch.Tensor and not pixels.is_meta:
            images.append(len(pixels))
            clock.now += 3.0 * len(pixels)
        return forward(self, pixels)

    monkeypatch.setattr(slow_network.Slow, "forward", counting)
    recipe = resolve(
        config.load(
            {
                **settings,
                "student": student,
                "data": data,
                "losses": [{"kind": "ce"}],
                "teacher": {},
            }
        )
    )
    lines = forecast(recipe, everything=True).splitlines()
    assert sum(images) <= 40  # about half of them in the examination of the network
    assert any(
        "student timed with 2 images of 1,024" in line
        for line in lines
        if line.startswith("speed")
    )


@pytest.mark.parametrize(
    ("prices", "cores", "words"),
    [
        (["instance=ml.p4d.24xlarge"], 96, "not known.*96 CPU cores"),
        (["instance=ml.p4d.24xlarge", "per_hour=25"], 2, "not known.*2 CPU cores"),
        (["instance=ml.c7i.8xlarge"], 2, "not known.*2 CPU cores.*c7i"),
        (["instance=ml.c7i.8xlarge"], 32, r"about USD [\d.e-]+ at USD 1\.714 an hour$"),
        (["per_hour=25"], 2, r"about USD.*USD 25 an hour, if.*this machine.*2 CPU"),
        (["instance=own", "per_hour=25"], 2, "about USD.*if.*this machine.*2 CPU"),
    ],
)
def test_only_hours_of_the_same_kind_of_machine_have_a_price(
    settings, monkeypatch, prices, cores, words
):
    """Two cores took USD 0.808 at the price of eight GPUs."""
    monkeypatch.setattr(estimate, "cores", lambda: cores)
    keys = [f"price.{price}" for price in prices]
    recipe = resolve(config.load(settings, keys))
    with distributed(recipe.backend) as backend:
        bench = estimate.Bench.of(recipe, open_sources(recipe.data), backend)
        timings: dict[str, stopwatch.Timing] = dict.fromkeys(
            estimate.PARTS, stopwatch.Timing(1.0, 1.0, 8)
        )
        (line,) = [
            line
            for line in estimate.estimate(bench, timings)
            if line.startswith("cost")
        ]
    assert re.search(words, line)
    assert ("about USD" in line) == words.startswith("about")


@pytest.mark.parametrize(
    ("gpus", "cores", "is_like"), [(8, 96, True), (1, 96, False), (8, 16, False)]
)
def test_a_gpu_machine_is_known_by_its_gpus_and_cores(
    monkeypatch, gpus, cores, is_like
):
    monkeypatch.setattr(estimate, "cores", lambda: cores)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    machine = instances.TABLE["ml.p4d.24xlarge"]
    facts = BackendFacts(cpu=False, cuda=True)
    assert estimate._is_like(machine, facts) == is_like


def test_each_part_that_was_timed_with_fewer_images_says_so(settings):
    recipe = resolve(config.load(settings, ["data.batch_size=32"]))
    with distributed(recipe.backend) as backend:
        bench = estimate.Bench.of(recipe, open_sources(recipe.data), backend)
        timings: dict[str, stopwatch.Timing] = dict.fromkeys(
            estimate.PARTS, stopwatch.Timing()
        )
        timings["step"] = stopwatch.Timing(1.0, 1.0, 32)
        timings["teacher"] = stopwatch.Timing(1.0, 1.0, 4)
        timings["load"] = stopwatch.Timing(1.0, 1.0, 16)
        line = estimate.estimate(bench, timings)[1]
    assert re.findall(r"\w+ timed with \d+ images of \d+", line) == [
        "teacher timed with 4 images of 32"
    ]


@pytest.mark.parametrize(("alone", "times"), [(40.0, 2.75), (100.0, 1.1), (250.0, 1.0)])
def test_labels_alone_get_a_tenth_more_than_distilling_costs(alone, times):
    """A verdict allows a tenth less, and a length that is named stays."""
    factor, message = estimate.same_cost(100.0, alone, fixed=False)
    assert factor == pytest.approx(times)
    assert f"at most {spoken(times * alone)}," in message
    assert "run.baseline_steps" not in message
    factor, message = estimate.same_cost(100.0, alone, fixed=True)
    assert factor == 1.0
    assert "without run.baseline_steps" in message


def test_a_key_still_gives_a_verdict_where_the_estimate_is_off_by_a_sixth():
    assert AIM * (1 - 1 / 6) >= ENOUGH

"""`--check` advises: candidates are timed in turns, and only keys that pay are printed."""

import re
from dataclasses import asdict

import pytest
import torch

from kd import config
from kd.core.text import clock as spoken
from kd.jobs import estimate, stopwatch
from kd.jobs import forecast as advice
from kd.jobs.forecast import Found, forecast, torch_stages
from kd.jobs.stopwatch import fastest, timed
from kd.parts.backends.cpu import CPU
from kd.setup.build import distributed
from kd.setup.data import open_sources
from kd.setup.modes import ExecutionMode
from kd.setup.recipe import resolve
from kd.study.paying import AIM, ENOUGH

RULE, FUSED = ExecutionMode("bf16", "unfused"), ExecutionMode("bf16", "fused")
COMPILED, EXPORTED = ExecutionMode("bf16", "unfused", compiled=True), ExecutionMode("fp32", "openvino")


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
    made = Clock()
    monkeypatch.setattr(stopwatch, "time", made)
    monkeypatch.setattr(advice, "command_seconds", made.perf_counter)
    return made


@pytest.fixture
def compared(clock):
    """Compare modes that take so long; return also which of them were made."""

    def compare(seconds: float, **times: float) -> tuple[Found, list[ExecutionMode]]:
        modes = {"rule": RULE, "fused": FUSED, "compiled": COMPILED, "exported": EXPORTED}
        names, made = {modes[name]: taken for name, taken in times.items()}, []

        def work(mode: ExecutionMode):
            made.append(mode)
            if not callable(names[mode]) and names[mode] < 0:
                raise RuntimeError("no compiler here\nand a long explanation")
            return clock.working(names[mode])

        return advice.compared(RULE, [[asdict(mode) for mode in names]], work, seconds, "teacher"), made

    return compare


def test_only_what_is_faster_is_advised(compared):
    assert compared(1e6, rule=0.01, fused=0.01)[0][:2] == ([], [])
    (line,) = compared(1e6, rule=0.03, fused=0.005)[0].keys
    key, _, reason = line.partition("   # ")
    assert key == "teacher.attention: fused"
    assert reason.startswith("teacher: bf16+fused is ")
    assert reason.endswith(" times as fast as bf16+unfused")


@pytest.mark.parametrize(("seconds", "tried"), [(239.0, False), (240.0, True)])
def test_a_form_is_timed_where_it_can_pay(compared, seconds, tried):
    """A minute of compiling in work of four minutes."""
    found, made = compared(seconds, rule=0.03, compiled=0.005)
    assert (COMPILED in made) == tried
    assert bool(found[0]) == tried


@pytest.mark.parametrize(("age", "tried"), [(89.0, True), (91.0, False)])
def test_a_form_that_would_not_be_ready_in_time_is_not_tried(compared, clock, age, tried):
    """Of a long run, on a command that has already taken so long: compiling takes a minute and more."""
    clock.now = age
    assert (COMPILED in compared(1e6, rule=0.03, compiled=0.005)[1]) == tried
    assert FUSED in compared(1e6, rule=0.03, fused=0.005)[1]


def test_a_form_must_save_more_than_it_costs(compared):
    assert compared(240.0, rule=0.03, compiled=0.027)[0][:2] == ([], [])  # a tenth of 240 s, and a minute at each start
    keys = [line.split("   #")[0] for line in compared(1e6, rule=0.03, exported=0.005)[0][0]]
    assert keys == ["teacher.precision: fp32", "teacher.runtime: openvino"]


def test_a_mode_that_cannot_run_is_reported_and_skipped(compared):
    found, _ = compared(1e6, rule=0.005, compiled=-1.0)
    said = "teacher: bf16+unfused+compiled cannot be run here (RuntimeError: no compiler here and a long explanation)"
    assert found[:2] == ([], [said])


def test_keys_that_are_named_are_left_alone():
    stages = torch_stages("auto", "auto", 2)
    assert stages == [[{"precision": "fp32"}, {"precision": "bf16"}], [{"kernel": "unfused"}, {"kernel": "fused"}]]
    assert torch_stages("auto", "unfused", 2) == stages[:1]
    assert torch_stages("bf16", "auto", 2) == stages[1:]
    assert torch_stages("bf16", "auto", 0) == []


@pytest.mark.parametrize(
    ("rounds", "winner"),
    [
        ({"plain": [20] * 7 + [60], "other": [19.5] * 8}, "plain"),
        ({"plain": [20] * 7 + [60], "other": [18] * 7 + [90]}, "other"),
        ({"plain": [20] * 7 + [60], "other": [10] * 6 + [21, 61]}, "plain"),  # only in six of eight
        ({"plain": [20] * 8, "other": [18] * 8, "third": [17] * 8}, "third"),
        ({"plain": [20] * 8, "other": [25] * 8}, "plain"),
        ({"plain": [900] * 8, "other": [400] * 8}, "other"),  # after one round the time is over
    ],
)
def test_a_candidate_must_win_clearly(clock, rounds, winner):
    seconds = {name: iter([1, *times]) for name, times in rounds.items()}  # after a warm-up
    works = {name: clock.working(lambda times=times: next(times) / 100) for name, times in seconds.items()}
    assert fastest(works)[0] == winner


def test_a_first_call_that_compiles_is_not_measured(clock):
    first_call = iter([0.7])  # lost, if it were measured
    assert timed(lambda images: clock.working(lambda: next(first_call, 0.005)), 1, 1).ms == pytest.approx(5)
    first_call = iter([0.7])
    slow_once = {"a": clock.working(0.02), "b": clock.working(lambda: next(first_call, 0.001))}
    assert fastest(slow_once)[0] == "b"


def test_printed_keys_are_valid_yaml(settings, monkeypatch):
    """The keys are YAML that a file takes; the models are as they were before."""
    line = "teacher.attention: fused   # 1.30 times"
    monkeypatch.setattr(advice, "compared", lambda *given: Found([line], ["form: cannot be run here"]))
    settings["sifter"] = {"kind": "history"}
    lines = forecast(resolve(config.load(settings)), everything=True).splitlines()
    start = lines.index(line) - 1
    assert lines[start].startswith("keys      faster here")
    assert any(one.startswith("sifter    'history' ") for one in lines[:start])
    assert line not in forecast(resolve(config.load(settings))).splitlines()  # only --check=all compares
    assert config.load({**settings, "teacher.attention": "fused"}).teacher.attention == "fused"


def test_a_single_win_is_not_advised(compared):
    """A neighbour slows the plain mode in the warm-up and the first four of eight rounds alone."""
    disturbed = iter([0.01] + [0.05] * 4)
    assert compared(1e6, rule=lambda: next(disturbed, 0.01), fused=0.01)[0].keys == []


def test_threads_are_timed_with_the_keys_that_were_found(clock):
    """Issue 62: fp32 and one thread were each said to be 4 times as fast; together they were 6 times, not 16."""
    assert advice.compare_threads(2, [clock.working(0.01)]) == (2, [])

    def step(precision: str) -> float:
        return {("bf16", 2): 0.24, ("bf16", 1): 0.06, ("fp32", 2): 0.06, ("fp32", 1): 0.04}[
            precision, torch.get_num_threads()
        ]

    before = torch.get_num_threads()
    try:
        number, keys = advice.compare_threads(2, [clock.working(lambda: step("fp32"))])
        assert (number, keys) == (1, ["backend.threads: 1   # 1.50 times as fast as 2 threads"])
        plain = advice.stepping(2, [clock.working(lambda: step("bf16"))])
        best = advice.stepping(1, [clock.working(lambda: step("fp32"))])
        assert advice.fastest({"plain": plain, "all": best}) == ("all", pytest.approx(6.0))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("overhead", "each", "most", "tried"),
    [
        (0.1, 0.001, 64, [2, 39, 64]),  # a micro-batch
        (0.0, 0.01, 1024, [2, 199]),  # which take all of the time
        (0.0, 2.0, 1024, [2]),  # a network whose smallest step bursts the budget
        (0.0, 2.0, 1, [1]),
    ],
)
def test_a_part_is_timed_with_a_micro_batch_that_fits_the_time(clock, overhead, each, most, tried):
    sizes = []

    def make(images: int):
        sizes.append(images)
        return clock.working(overhead + each * images)

    found = timed(make, most, min(2, most))
    assert sizes == tried
    assert found.images == tried[-1]
    assert found.ms == pytest.approx(1000 * (each + overhead / found.images))
    assert found.cpu_ms == pytest.approx(2 * found.ms)
    trials = [overhead + each * images for images in tried]
    assert clock.now <= 2 * sum(trials) + stopwatch.TRIAL_SECONDS + trials[-1]


def counted(module, clock, overhead: float, each: float) -> list[int]:
    """Let each forward of real pixels take so long; return the numbers of their images."""
    images = []

    def forward(module, given):
        if type(given[0]) is torch.Tensor and not given[0].is_meta:
            images.append(len(given[0]))
            clock.now += overhead + each * len(given[0])

    module.register_forward_pre_hook(forward)
    return images


def test_the_students_step_is_timed_as_the_run_makes_it_however_slow_the_teacher(settings, clock):
    """16 images took 1.6 times as long each as the 64 of a step, where the teacher was slow: 505 steps for 887."""
    found = {}
    for slow in (0.001, 1.0):
        recipe = resolve(config.load(settings, ["data.batch_size=32", "run.baseline=true"]))
        with distributed(recipe.backend) as backend:
            bench = estimate.Bench.of(recipe, open_sources(recipe.data), backend)
            counted(bench.distillation.student, clock, 0.02, 0.001)
            counted(bench.live.model, clock, 0.0, slow)
            parts = estimate.measure(bench)
        found[slow] = parts["step"]
        assert parts["teacher"].ms == pytest.approx(1000 * slow)
    assert found[0.001] == pytest.approx(found[1.0])
    assert found[1.0].images == 32
    assert found[1.0].ms == pytest.approx(1 + 20 / 32)
    lines = estimate.estimate(bench, parts)
    alone = next(line for line in lines if line.startswith("baseline"))
    run = bench.planned(recipe)
    cost = run.images * run.epochs * (parts["step"].cpu_ms + parts["teacher"].cpu_ms + parts["load"].cpu_ms) / 1000
    assert f"at most {spoken(AIM * cost)}, fit and distillation {spoken(cost)}" in alone
    assert not any("scaled" in line for line in lines)


def test_measuring_a_fit_leaves_the_mode_of_the_student(settings, monkeypatch):
    """A student of convolutions was timed in the bfloat16 of its teacher's fit: 756 ms an image for 6."""
    monkeypatch.setattr(CPU, "auto_mode", property(lambda backend: "bf16+unfused"))
    monkeypatch.setattr(CPU, "bf16_pays", lambda backend, made_of, trained: made_of()[0] < 0.5)
    settings["student"] = {"model": "resnet10t"}
    settings["teacher"] = {**settings["teacher"], "model": "vit_tiny_patch16_224", "fit": {"epochs": 1}}
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


def test_a_check_of_a_slow_network_and_a_large_batch_looks_at_few_images(settings, clock, tmp_path, monkeypatch):
    """ViT-B at a batch of 1,024 had not ended after 290 s; here an image takes three seconds, and nothing is timed."""
    (tmp_path / "slow_network.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    import slow_network  # type: ignore[import-not-found]

    student = {"kind": "torch", "model": "slow_network:slow", "mean": [0, 0, 0], "std": [1, 1, 1]}
    data = {"kind": "food_mini", "root": str(tmp_path / "food"), "image_size": 16, "batch_size": 1024}
    images, forward = [], slow_network.Slow.forward

    def counting(self, pixels):
        if type(pixels) is torch.Tensor and not pixels.is_meta:
            images.append(len(pixels))
            clock.now += 3.0 * len(pixels)
        return forward(self, pixels)

    monkeypatch.setattr(slow_network.Slow, "forward", counting)
    recipe = resolve(
        config.load({**settings, "student": student, "data": data, "losses": [{"kind": "ce"}], "teacher": {}})
    )
    lines = forecast(recipe, everything=True).splitlines()
    assert sum(images) <= 40  # about half of them in the examination of the network
    assert any("timed on 2 images, scaled to 1024" in line for line in lines if line.startswith("speed"))
    assert any(line.startswith("keys      not compared: already a step of 2 images takes 6.0 s") for line in lines)


@pytest.mark.parametrize(
    ("instance", "words"), [("ml.p4d.24xlarge", "not known"), ("ml.c7i.8xlarge", r"about USD [\d.e-]+ at USD 1\.714")]
)
def test_a_cpus_time_has_no_price_of_an_accelerator(settings, instance, words):
    recipe = resolve(config.load(settings, [f"price.instance={instance}"]))
    with distributed(recipe.backend) as backend:
        bench = estimate.Bench.of(recipe, open_sources(recipe.data), backend)
        parts = dict.fromkeys(estimate.PARTS, stopwatch.Timed(1.0, 1.0, 8))
        (line,) = [line for line in estimate.estimate(bench, parts) if line.startswith("cost")]
    assert re.search(words, line)
    assert ("about USD" in line) == (instance == "ml.c7i.8xlarge")


@pytest.mark.parametrize(("alone", "times"), [(40.0, 2.75), (100.0, 1.1), (250.0, 1.0)])
def test_labels_alone_get_a_tenth_more_than_distilling_costs(alone, times):
    """A verdict allows a tenth less, and a length that is named stays."""
    found, said = estimate.same_cost(100.0, alone, fixed=False)
    assert found == pytest.approx(times)
    assert f"at most {spoken(times * alone)}," in said
    assert "run.baseline_steps" not in said
    found, said = estimate.same_cost(100.0, alone, fixed=True)
    assert found == 1.0
    assert "without run.baseline_steps" in said


def test_a_key_still_gives_a_verdict_where_the_estimate_is_off_by_a_sixth():
    assert AIM * (1 - 1 / 6) >= ENOUGH

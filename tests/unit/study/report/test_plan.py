"""The arithmetic of kd-plan against values worked out by hand, and against published lines."""

from __future__ import annotations

import pytest

from kd import config
from kd.config import instances
from kd.config.instances import Instance
from kd.jobs.estimate import Measured, line_through
from kd.setup.recipe import resolve
from kd.study.report.plan import step_cost
from kd.study.report.scaling import Job, StepCost, all_reduce_ms, exposed_ms, line, on, sizes

MACHINE = Instance("made.up", 10.0, 4, 100.0, 50.0, 80.0, 32)
"""4 devices, 50 GB/s inside, 80 Gbit/s = 10 GB/s outside, 16 cores."""
COST = StepCost(fixed=1.0, image=0.5, backward=0.25, load=0.0, gradient_mib=100.0)
JOB = Job(images=64_000, epochs=3, batch_size=64)


def test_a_cached_teacher_is_asked_in_some_epochs_only(settings):
    """Measured, and counted: a plan for a GPU took the teacher for every step."""
    found = Measured(1.0, 2.0, 0.5, 4.0, 0.0, 0.1, 1.0, 6.0, 8.0, "", 100, "2 CPU cores", False, "float32")
    settings["run"]["epochs"] = 4
    live, cached = (
        step_cost(found, resolve(config.load(settings, [f"teacher.cache.views={views}"])).loop, teacher=True)
        for views in (0, 1)
    )
    assert (live.image, live.gflop) == (6.0, 14.0)
    assert (cached.image, cached.gflop) == (3.0, 8.0)


def test_a_ring_by_hand():
    mib, rates = 100.0, MACHINE
    size = 100 * 2**20
    inside = 2 * 3 / 4 * size / 50e9 * 1000
    between = 2 * 1 / 2 * size / 10e9 * 1000
    latency = 0.02 * 4 * 2 * (3 + 1)  # four buckets, four hops there and back
    assert all_reduce_ms(mib, 4, 2, rates) == pytest.approx(inside + between + latency)
    assert all_reduce_ms(mib, 4, 1, rates) == pytest.approx(inside + 0.02 * 4 * 2 * 3)
    assert all_reduce_ms(mib, 1, 1, rates) == 0.0


@pytest.mark.parametrize(
    ("communication", "mib", "backward", "expected"),
    [
        (8.0, 100.0, 100.0, 2.0),  # three of four buckets are hidden
        (8.0, 100.0, 4.0, 4.0),  # 2 of the tail, and 8 - 2 - 4 that did not fit behind the backward pass
        (8.0, 100.0, 0.0, 8.0),
        (8.0, 10.0, 100.0, 8.0),  # one bucket: ready when the backward pass is over
        (0.0, 0.0, 1.0, 0.0),
    ],
)
def test_what_the_backward_pass_hides(communication, mib, backward, expected):
    assert exposed_ms(communication, mib, backward) == pytest.approx(expected)


def test_a_line_by_hand():
    alone, eight = line(JOB, COST, MACHINE, 1, 1), line(JOB, COST, MACHINE, 2)
    assert alone.step_ms == pytest.approx(1 + 0.5 * 64)
    assert alone.efficiency == 1.0
    assert alone.hours_epoch == pytest.approx(1000 * 33 / 3.6e6)
    communication = all_reduce_ms(100.0, 4, 2, MACHINE)
    exposed = exposed_ms(communication, 100.0, 0.25 * 8)
    assert eight.devices == 8
    assert eight.step_ms == pytest.approx(1 + 0.5 * 8 + exposed)
    assert eight.efficiency == pytest.approx(33 / (8 * eight.step_ms))
    assert eight.usd == pytest.approx(eight.hours_epoch * 3 * 2 * 10.0)


def test_micro_batches_pay_the_fixed_part_each_and_hide_behind_the_last():
    micro = Job(64_000, 3, 64, micro_batch=4)
    two = line(micro, COST, MACHINE, 1, 2)  # 32 images a device: 8 micro-batches
    assert two.compute_ms == pytest.approx(8 * (1 + 0.5 * 4))
    assert two.exposed_ms == pytest.approx(exposed_ms(two.communication_ms, 100.0, 0.25 * 4))


def test_loading_binds_where_the_cores_are_too_few():
    slow = StepCost(fixed=0.0, image=0.5, backward=0.25, load=40.0, gradient_mib=1.0)
    four = line(JOB, slow, MACHINE, 1)
    assert four.load_ms == pytest.approx(40 * 16 / 4)  # 16 images, 4 of 16 cores a device
    assert four.step_ms == four.load_ms


def test_a_small_step_takes_at_least_its_launches():
    cost = on(MACHINE, StepCost(0.0, 100.0, 50.0, 0.0, 1.0, gflop=3.5, kernels=1000), mfu=0.35)
    assert cost.image == pytest.approx(3.5 / (100 * 0.35))  # GFLOP / (TFLOP/s) is milliseconds
    assert cost.backward == pytest.approx(cost.image / 2)
    assert line(JOB, cost, MACHINE, 1, 1).step_ms == pytest.approx(max(6.0, 0.1 * 64))
    assert line(JOB, cost, MACHINE, 1).compute_ms == pytest.approx(6.0)


def test_kts_published_line():
    """3.20 h an epoch on 2 GPUs -> 0.11 h on 32; ViT-B to ViT-S at 224 px, 82.7 MiB of gradients, is our assumption.

    More GPUs alone explain half of it: they also changed batch, teacher's precision and loading.
    """
    p4d = instances.TABLE["ml.p4d.24xlarge"]
    cost = on(p4d, StepCost(0.0, 3.0, 1.0, 2.36, 82.7, gflop=62.96, kernels=622))
    job = Job(images=1_000_000, epochs=1, batch_size=1024, micro_batch=32)
    two, all_of_them = line(job, cost, p4d, 1, 2), line(job, cost, p4d, 4)
    assert all_of_them.devices == 32
    hours = 3.20 * all_of_them.step_ms / two.step_ms
    assert f"{hours:.3f}" == "0.215"
    assert f"{hours / (24 / 210):.1f}" == "1.9"  # 24 hours for 210 epochs


@pytest.mark.parametrize(
    ("machine", "one", "published"),
    [("p4de.24xlarge", 693, [1347, 2642, 5454, 10644]), ("p5.48xlarge", 1428, [2846, 5737, 11222, 21561])],
)
def test_published_scaling_of_a_large_vit(machine, one, published):
    """NeMo's user guide, ViT-g/14 (1,602 GFLOP an image, 1,013 M parameters): images/s of 1, 2, 4, 8, 16 machines."""
    instance = instances.find(machine)
    mfu = one / 8 * 1602 / 1000 / instance.tflops
    model = StepCost(fixed=0.0, image=1.0, backward=2 / 3, load=0.0, gradient_mib=1931.0, gflop=1602.0)
    for count, images_per_second in zip((2, 4, 8, 16), published, strict=True):
        batch = count * 8 * 64
        step = line(Job(batch, 1, batch, 64), on(instance, model, mfu), instance, count).step_ms
        assert 1000 * batch / step == pytest.approx(images_per_second, rel=0.06)


def test_sizes_double_up_to_all_machines():
    assert sizes(MACHINE, 6) == [(1, 1), (1, 4), (2, 4), (4, 4), (6, 4)]
    assert sizes(instances.TABLE["ml.g5.xlarge"], 2) == [(1, 1), (2, 1)]


def test_the_line_through_two_sizes():
    assert line_through(4, 3.0, 16, 9.0) == (1.0, 0.5)
    assert line_through(4, 1.0, 16, 9.0) == (0.0, 9 / 16)  # it would begin below 0
    assert line_through(4, 9.0, 16, 9.0) == (0.0, 9 / 16)
    assert line_through(1, 9.0, 1, 9.0) == (0.0, 9.0)


def test_every_machine_has_a_price_and_a_name_with_and_without_prefix():
    for name, row in instances.TABLE.items():
        assert name == row.name
        assert row.per_hour > 0
        assert row.devices >= 1
        assert (row.link_gb_s > 0) == (row.devices > 1)
        assert instances.find(name.removeprefix("ml.")) is instances.find(name) is row
    assert instances.find("ml.p4d") is None

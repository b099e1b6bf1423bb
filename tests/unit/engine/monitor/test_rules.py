"""The rules at their thresholds. Whole runs with a fault: `test_observer.py` and
`benchmarks/rules.py`.
"""

import json
from dataclasses import asdict

import pytest

from kd import config
from kd.engine.monitor import rules
from kd.engine.monitor.evidence import MIN_SAMPLES, Evidence, Facts
from kd.engine.monitor.rules import find_bottlenecks

WAITING = {"data": 10.0, "forward": 10.0, "backward": 10.0}
DECODES = {"busy": 1.0, "decoding": 0.8}
READS = {"busy": 0.4, "decoding": 0.9}
AUGMENTS = {"busy": 1.0, "decoding": 0.08}


def loading(seconds: float, shares: dict[str, float], steps: int = 40) -> dict:
    """What making the images of each of so many steps took, milliseconds."""
    ms = {"seconds": seconds} | {
        name: share * seconds for name, share in shares.items()
    }
    return {name: steps * value for name, value in ms.items()}


def steady(steps: int = 40, ms: dict[str, float] | None = None, **changes) -> dict:
    """A row of steady steps, 20 ms each unless told otherwise, that ends at 1,000 s."""
    step_ms = ms or {
        "data": 0.5,
        "teacher": 8.0,
        "forward": 4.0,
        "backward": 6.0,
        "optimizer": 1.0,
        "other": 0.5,
    }
    spans = {name: value * steps for name, value in step_ms.items()}
    row = {
        "time": 1000.0,
        "step": 100,
        "steps": steps,
        "kind": "steady",
        "clock": "host",
        "ms": spans,
    }
    row |= {
        "wall_ms": sum(spans.values()),
        "median_ms": sum(step_ms.values()),
        "slowest": [90, 30.0, "data"],
    }
    return (
        row | {"loading_ms": loading(sum(step_ms.values()), DECODES, steps)} | changes
    )


def sample(i: int = 0, **changes) -> dict:
    """What a quiet machine of two cores does during `steady`."""
    row = {
        "time": 999.9 - 0.01 * i,
        "cpu": [60.0, 50.0],
        "process_mib": 500.0,
        "process_cpu": 90.0,
        "gpu": [],
    }
    return row | {"workers_cpu": 20.0} | changes


def ask(
    *rows: dict, samples: list[dict] | None = None, **facts
) -> dict[str, rules.Finding]:
    """Return the findings on rank 0's rows, by rule."""
    samples = [sample(i) for i in range(30)] if samples is None else samples
    of_run = Facts(**{"cores": 2, "workers": 1, **facts})
    return {
        finding.rule: finding
        for finding in find_bottlenecks(
            Evidence({0: rows or [steady()]}, samples, of_run)
        )
    }


STEP = {
    "data": 0.5,
    "teacher": 8.0,
    "forward": 4.0,
    "backward": 6.0,
    "optimizer": 1.0,
    "other": 0.5,
}


@pytest.mark.parametrize(
    (
        "added_ms",
        "share",
        "key",
        "value",
    ),  # the parts of a step, 20 ms, and how often they are each 10 steps
    [
        pytest.param(
            {"evaluation": 70.0}, "78 %", "run.every.evaluate", 250, id="evaluation"
        ),
        pytest.param(
            {"checkpoint": 8.6}, "30 %", "run.every.checkpoint", 90, id="checkpoint"
        ),
        pytest.param({"evaluation": 6.0, "checkpoint": 1.0}, "", "", None, id="usual"),
    ],
)
def test_a_large_share_of_a_step_is_a_finding(added_ms, share, key, value):
    row = steady(ms=STEP | added_ms)
    finding = ask(row, evaluate=10, checkpoint=10).get("TimeShare")
    assert (finding is not None) == bool(share)
    if finding is not None:
        assert share in finding.evidence
        assert (finding.severity, finding.key, finding.value) == ("warning", key, value)
    assert "TimeShare" not in ask(
        row | {"clock": "tracing"}, evaluate=10, checkpoint=10
    )
    assert "TimeShare" not in ask(row, evaluate=40, checkpoint=40)  # one, at the end


def test_each_rule_says_what_to_set():
    """Every finding of the tests below has this form, and its key is one of the
    configuration.
    """
    reading = steady(ms=WAITING, loading_ms=loading(10.0, READS))
    findings = ask(reading, workers=0) | ask(steady(ms=WAITING), workers=0, cores=4)
    assert findings.keys() == {"IOBottleneck", "Dataloader"}
    for finding in findings.values():
        section, _, key = finding.key.partition(".")
        section_keys = config.to_dict(config.Config(data={"kind": "food_mini"}))[
            section
        ]
        assert key in section_keys
        assert finding.advice.startswith(f"Set {finding.key}={finding.value}: ")
        assert "%" in finding.threshold
        assert json.loads(json.dumps(asdict(finding)))["rule"] == finding.rule
    assert len(rules.RULES) == 9


def test_a_healthy_run_has_no_finding():
    assert ask() == {}
    assert find_bottlenecks(Evidence({}, [])) == []
    assert find_bottlenecks(Evidence({0: [steady(steps=5)]}, [sample()])) == []


def test_the_finding_on_data_wait_names_its_cause():
    """The same wait: decoding, where there is a core for it, and where there is none;
    reading; and just under it.
    """
    alone = steady(ms=WAITING, loading_ms=loading(10.0, DECODES))
    findings = ask(alone, workers=0, cores=4)
    assert (
        findings.keys(),
        findings["Dataloader"].key,
        findings["Dataloader"].value,
    ) == (
        {"Dataloader"},
        "data.workers",
        1,
    )
    assert findings["Dataloader"].severity == "warning"
    assert "10.0 of 30.0 ms (33 %)" in findings["Dataloader"].evidence
    # half of the compute hides it all
    assert ask(alone, workers=0, cores=8)["Dataloader"].value == 1
    slow = steady(ms=WAITING | {"data": 100.0}, loading_ms=loading(100.0, DECODES))
    assert ask(slow, workers=0, cores=8)["Dataloader"].value == 5
    # no core for a worker
    assert ask(slow, workers=0, cores=2).keys() == {"CPUBottleneck"}
    full = [sample(i, cpu=[99.0, 97.0]) for i in range(9)]
    # other programs have the cores
    assert ask(slow, workers=0, cores=8, samples=full).keys() == {"CPUBottleneck"}

    findings = ask(steady(ms=WAITING))  # its one worker works all the time
    assert (findings.keys(), findings["CPUBottleneck"].key) == (
        {"CPUBottleneck"},
        "data.store",
    )
    assert ask(steady(ms=WAITING), cores=8).keys() == {"Dataloader"}
    assert (
        ask(steady(ms=WAITING), store="ram") == ask(steady(ms=WAITING), epochs=1) == {}
    )
    assert (
        ask(steady(ms=WAITING), local_ranks=2, cores=4)["CPUBottleneck"].value == "disk"
    )

    findings = ask(steady(ms=WAITING, loading_ms=loading(10.0, READS)), workers=0)
    assert (findings.keys(), findings["IOBottleneck"].value) == (
        {"IOBottleneck"},
        "ram",
    )
    reading = steady(ms=WAITING, loading_ms=loading(30.0, READS))
    assert ask(reading)["IOBottleneck"].value == "ram"
    assert [
        ask(reading, **facts)["IOBottleneck"].value
        for facts in ({"store": "ram"}, {"epochs": 1})
    ] == [2, 2]


def test_only_samples_during_the_steady_steps_count():
    """The first 0.8 s of steps end at 1,000 s, the last at 1,002 s."""
    samples = [
        sample(time=time) for time in (200.0, 999.1, 999.3, 1000.5, 1001.9, 1002.1)
    ]
    starts = Evidence({0: [steady(), steady(time=1002.0)]}, samples).during()
    assert [[row["time"] for row in start] for start in starts] == [
        [999.3, 1000.5, 1001.9]
    ]


STARTED = {
    "kind": "setup",
    "steps": 0,
    "step": 0,
    "wall_ms": 5000.0,
    "ms": {"setup": 5000.0},
}


def test_the_set_up_between_two_starts_is_no_load():
    """The cores are full in the steps, and idle in the minute in which the run was
    started again.
    """
    rows = [steady(), STARTED | {"time": 1059.0}, steady(time=1060.0)]
    samples = [
        sample(time=end - 0.1 * i, cpu=[100.0, 100.0])
        for end in (1000.0, 1060.0)
        for i in range(5)
    ]
    samples += [sample(time=1002.0 + i, cpu=[0.0, 0.0]) for i in range(50)]
    assert Evidence({0: rows}, samples).load() == 100.0


def test_a_slow_loader_is_named_by_its_parts():
    shares = {"busy": 1.0, "decoding": 0.5, "resizing": 0.3}
    row = steady(ms=WAITING, loading_ms=loading(10.0, shares))
    store = (
        "50 % of the loading is decoding, 30 % resizing, the rest augmenting; a store"
        " would save 5.0 ms of a step"
    )
    assert ask(row, workers=0)["CPUBottleneck"].evidence.endswith(store)
    assert ask(row, workers=0, cores=4)["Dataloader"].evidence.endswith(store)
    assert ask(row, workers=0, cores=4, store="ram")["Dataloader"].evidence.endswith(
        "the rest augmenting"
    )
    row = steady(ms=WAITING, loading_ms=loading(10.0, shares | {"whole": 0.4}))
    assert (
        "; 4.0 ms decode whole images" in ask(row, workers=0)["CPUBottleneck"].evidence
    )
    # of a run whose resizing was not counted
    older = steady(ms=WAITING, loading_ms=loading(10.0, DECODES))
    assert (
        "80 % of the loading is decoding, the rest resizing and"
        in ask(older, workers=0)["CPUBottleneck"].evidence
    )


@pytest.mark.parametrize(("ms", "long"), [(2.2, False), (2.3, True)])
def test_a_wait_is_long_by_its_share_of_a_step(ms, long):
    """A tenth of a step of 20 ms and the wait."""
    row = steady(ms=WAITING | {"data": ms}, loading_ms=loading(30.0, DECODES))
    assert (rules.data_wait(Evidence({0: [row]}, [])) is not None) == long


def test_a_wait_that_nothing_helps_against_is_no_finding():
    assert ask(steady(ms=WAITING | {"data": 2.2}), workers=0) == {}  # a short one
    # the worker has time to spare
    assert ask(steady(ms=WAITING, loading_ms=loading(15.0, DECODES))) == {}
    assert ask(steady(ms=WAITING, loading_ms={})) == {}  # other hosts load
    # no store saves augmentation
    assert ask(steady(ms=WAITING, loading_ms=loading(30.0, AUGMENTS))) == {}
    # the cores are not known
    assert (
        ask(steady(ms=WAITING), samples=[sample(i) for i in range(MIN_SAMPLES - 1)])
        == {}
    )


def test_more_workers_than_cores_are_a_finding():
    full = [sample(i, cpu=[99.0, 97.0], workers_cpu=60.0) for i in range(9)]
    finding = ask(samples=full, workers=8)["CPUBottleneck"]
    assert (finding.key, finding.value, finding.severity) == (
        "data.store",
        "ram",
        "warning",
    )
    assert ask(samples=full, workers=8, store="ram")["CPUBottleneck"].value == 1
    assert (
        ask(steady(loading_ms=loading(60.0, AUGMENTS)), samples=full, workers=8)[
            "CPUBottleneck"
        ].value
        == 1
    )
    assert ask(samples=full, workers=2) == {}
    assert (
        ask(samples=[loaded | {"workers_cpu": 5.0} for loaded in full], workers=8) == {}
    )
    # they wait for bytes
    assert ask(steady(loading_ms=loading(60.0, READS)), samples=full, workers=8) == {}
    assert ask(samples=[sample(i) for i in range(9)], workers=8) == {}  # there is room
    idle = ask(samples=[sample(i, workers_cpu=1.0) for i in range(9)], workers=9)[
        "CPUBottleneck"
    ]
    # far too many, whatever they take
    assert (idle.key, idle.value, idle.severity) == (
        "data.workers",
        1,
        "info",
    )
    gpu = ask(
        samples=[sample(i, workers_cpu=1.0) for i in range(9)],
        workers=40,
        cores=8,
        device="cuda",
    )
    assert gpu["CPUBottleneck"].value == 7


def test_a_teacher_that_runs_in_every_epoch_is_a_finding():
    """8 of 20 ms a step: of ten epochs eight are saved."""
    finding = ask(live=True, epochs=10.0)["Teacher"]
    assert (finding.key, finding.value, finding.severity) == (
        "teacher.cache.views",
        2,
        "warning",
    )
    assert "40 % of a step" in finding.evidence
    assert ask(live=True, epochs=4.0)["Teacher"].value == 2
    assert ask(epochs=10.0) == ask(live=True, epochs=2.0) == {}
    assert ask(steady(ms=STEP | {"teacher": 2.0}), live=True, epochs=99.0) == {}
    assert ask(steady(steps=19), live=True, epochs=10.0) == {}


def test_float32_where_bfloat16_has_units_is_a_finding():
    finding = ask(float32=lambda: True)["Precision"]  # 18 of 20 ms compute
    assert (finding.key, finding.value, finding.severity) == (
        "backend.precision",
        "bf16",
        "warning",
    )
    assert "90 % of a step" in finding.evidence
    assert ask() == {}
    assert ask(
        steady(ms=WAITING | {"data": 90.0}), workers=0, float32=lambda: True
    ).keys() == {"CPUBottleneck"}


@pytest.mark.parametrize(
    ("workers", "data", "key"),
    [(0, 10.0, "data.workers"), (4, 0.5, "student.compile")],
    ids=["starved", "host"],
)
def test_an_idle_gpu_is_a_finding(workers, data, key):
    """By rows of the device, as CUDA's events would give them. Never run on a GPU."""
    device = {"data": 40 * data, "forward": 400.0, "backward": 400.0}
    row = steady(device_ms=device, clock="device")
    gpu = [{"utilization": 45.0, "memory_mib": 70_000.0, "memory_total_mib": 80_000.0}]
    samples = [sample(i, gpu=gpu) for i in range(9)]
    findings = ask(row, samples=samples, device="cuda", workers=workers, cores=8)
    assert findings["LowGPUUtilization"].key == key
    assert "45 % busy" in findings["LowGPUUtilization"].evidence
    if workers == 0:  # one more than there are, where there are few cores
        slow = row | {"loading_ms": loading(30.0, DECODES)}
        with_one_worker = ask(slow, samples=samples, device="cuda", workers=1, cores=2)[
            "LowGPUUtilization"
        ]
        assert (findings["LowGPUUtilization"].value, with_one_worker.value) == (7, 2)
    busy = [sample(i, gpu=[gpu[0] | {"utilization": 71.0}]) for i in range(9)]
    assert "LowGPUUtilization" not in ask(
        row, samples=busy, device="cuda", workers=workers, cores=8
    )


def test_gpus_that_the_run_does_not_use_say_nothing():
    busy, idle = (
        {"utilization": x, "memory_mib": 700 * x, "memory_total_mib": 80_000.0}
        for x in (99.0, 0.0)
    )
    samples = [sample(i, gpu=[idle, busy, idle, idle]) for i in range(9)]
    row = steady(ms={"forward": 10.0, "backward": 10.0, "optimizer": 10.0})
    assert ask(row, samples=samples, device="cuda") == {}
    assert ask(row, samples=samples, device="cuda", local_ranks=2).keys() == {
        "LowGPUUtilization"
    }
    assert ask(samples=samples, device="cpu") == {}


def test_ranks_are_compared_by_their_own_work():
    waits = {"forward": 10.0, "backward": 10.0, "communication": 10.0}
    works = {"forward": 20.0, "backward": 10.0, "communication": 0.5}

    def balance(*ranks: dict) -> list:
        rows = {rank: [steady(ms=ms)] for rank, ms in enumerate(ranks)}
        return [
            candidate
            for candidate in find_bottlenecks(Evidence(rows, [], Facts(workers=1)))
            if candidate.rule == "LoadBalancing"
        ]

    (finding,) = balance(waits, works, waits)
    assert "rank 1 works 30 ms per step and the others 20" in finding.evidence
    assert "forward" in finding.evidence
    assert finding.severity == "warning"
    assert balance(waits, waits | {"backward": 12.0}) == []
    (finding,) = balance(waits, waits | {"data": 9.0})
    assert (finding.key, finding.value) == ("data.store", "ram")

"""`kd-train CONFIG --compile-only`: every run of the configuration is stepped, and nothing is left."""

from __future__ import annotations

from pieces import listing, tiny


def test_it_steps_every_run_and_writes_nothing(command, written, inside):
    fit = {"epochs": 2, "folder": str(inside / "teachers")}
    path = written(teacher={**tiny(2, 48), "fit": fit}, run={"baseline": True, "every": {"log": 2}})
    before = listing(inside)
    answer = command("train", path, "--compile-only")
    assert answer.code == 0, answer
    lines = answer.out.strip().splitlines()
    assert lines[0].startswith("teacher: 3 steps, 2 evaluations")
    assert lines[1].startswith("tiny: 3 steps, 2 evaluations")
    assert lines[2].startswith("tiny (labels only): 3 steps, 2 evaluations")
    assert listing(inside) == before
    assert sorted(p.name for p in inside.iterdir() if p.is_dir()) == []


def test_numbers_that_mean_nothing_do_not_stop_it(command, written, inside):
    # a compiler that collects graphs executes none of them
    answer = command("train", written(optimizer={"lr": 1e30, "clip": 0.0, "warmup": 0.0}), "--compile-only")
    assert answer.code == 0, answer
    assert listing(inside) == ["tiny.yaml"]


def test_a_mistake_is_found_before_anything_is_compiled(refused, written):
    assert "data.batch_size" in refused("train", written(data={"batch_size": 1000}), "--compile-only")

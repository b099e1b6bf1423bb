"""`kd-plan`: hours, cost and scaling efficiency of a configuration on rented machines, before one is rented."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kd.config import instances
from kd.config.instances import Instance
from kd.core.errors import ConfigError, did_you_mean
from kd.core.host import cores
from kd.core.text import money, percent, table
from kd.jobs.estimate import Measured, describe, measure
from kd.setup.build import distributed
from kd.setup.data import open_sources
from kd.setup.loaders import split_batch
from kd.setup.recipe import LoopPlan, Recipe
from kd.study.report.report import read
from kd.study.report.scaling import BUCKET_MIB, LATENCY_MS, MFU, Job, Line, StepCost, line, on, sizes


def plan(recipe: Recipe, machine: Sequence[str], mfu: float = MFU, run: Path | None = None, trust: bool = False) -> str:
    """Return the table of a configuration on 1 device up to all devices of some machines, with its assumptions.

    `machine` is a name and, optionally, how many: ["p4d.24xlarge", "x4"]. `mfu` is the share of a device's peak rate
    that training reaches, unless `run`, a run folder made on such devices, has the step.
    """
    instance, machines = parse(machine)
    if recipe.price.per_hour:
        instance = replace(instance, per_hour=recipe.price.per_hour)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("WORLD_SIZE", "is above 1, but a plan measures one process", "", "Start it without torchrun")
    if not 0 < mfu <= 1:
        raise ConfigError("--mfu", f"is {mfu:g}", "Above 0, at most 1", "0.35 is usual")
    data, devices = open_sources(recipe.data), machines * instance.devices
    split = split_batch(data.section, 1, len(data.train))
    if devices > split.batch_size:
        wrong = f"{machines} x {instance.name} have {devices} devices, but a step has {split.batch_size} images"
        raise ConfigError("--on", wrong, "An image or more for each device", "Take fewer, or raise data.batch_size")
    with distributed(recipe.backend) as backend:
        measured = measure(recipe.teacher, recipe.student, data, split, backend)
    here = step_cost(measured, recipe.loop, recipe.teacher.needed)
    cost, origin = of_run(run, here, trust) if run is not None else elsewhere(instance, here, measured, mfu)
    epochs = recipe.loop.images(len(data.train), split.batch_size) / len(data.train)
    job = Job(len(data.train), epochs, split.batch_size, data.section.micro_batch)
    lines = [line(job, cost, instance, *size) for size in sizes(instance, machines)]
    return "\n".join([_table(lines, instance), "", origin, *_assumptions(lines[-1], here, instance, job)])


def parse(machine: Sequence[str]) -> tuple[Instance, int]:
    """Return the machine and how many of `["p4d.24xlarge", "x4"]`."""
    name, *rest = machine
    instance = instances.find(name)
    if instance is None:
        near = did_you_mean(name, [one.removeprefix("ml.") for one in instances.TABLE]) or "See kd-plan --instances"
        raise ConfigError("--on", f"no machine '{name}'", f"One of {', '.join(instances.TABLE)}", near)
    text = rest[0] if rest else "x1"
    count = re.fullmatch(r"x?([1-9][0-9]{0,3})", text)
    if count is None or len(rest) > 1:
        raise ConfigError("--on", f"'{' '.join(rest)}' is no number of machines", "x1 to x9999", "Such as x4")
    return instance, int(count[1])


def elsewhere(instance: Instance, here: StepCost, measured: Measured, mfu: float) -> tuple[StepCost, str]:
    """Return the cost of a step on a device of a machine, from what was measured here, and lines about it."""
    origin = f"step      measured here: {describe(measured)}"
    if not instance.tflops:
        if measured.accelerator:
            wrong = f"{instance.name} has no accelerator, but the step is measured on {measured.device}"
            raise ConfigError("--on", wrong, "A CPU for a CPU", "Add backend.kind=cpu")
        scale = cores() / (instance.vcpus / 2)
        cost = replace(here, fixed=scale * here.fixed, image=scale * here.image, backward=scale * here.backward)
        note = f"{instance.vcpus / 2:g} cores instead of {cores()}, each as fast (an assumption)"
        return cost, f"{origin}\n          {note}"
    if measured.accelerator:
        note = f"taken for a device of {instance.name} (an assumption where it is another one)"
        return here, f"{origin}\n          {note}"
    cost = on(instance, here, mfu)
    if measured.uncounted:
        origin += f"\n          left out: the teacher, which runs in {measured.uncounted}; --run RUN has it"
    return cost, (
        f"{origin}\n          on {instance.name}: {cost.image:.4f} ms an image, from {cost.gflop:.2f} GFLOP at "
        f"{percent(mfu)} of {instance.tflops:g} TFLOP/s, at least {cost.launch:.1f} ms for {cost.kernels} kernels\n"
        "          (assumptions: --mfu, or --run RUN made on such devices)"
    )


def listing() -> str:
    """Return the table of machines."""
    rows = [
        {
            "machine": one.name,
            "USD/h": f"{one.per_hour:.3f}",
            "devices": one.devices,
            "TFLOP/s a device": f"{one.tflops:g}" if one.tflops else "-",
            "link, GB/s": f"{one.link_gb_s:g}" if one.link_gb_s else "-",
            "network, Gbit/s": f"{one.network_gbit_s:g}",
            "vCPUs": one.vcpus,
        }
        for one in instances.TABLE.values()
    ]
    note = f"On-demand list prices of {instances.PRICED_ON}, us-east-1; price.per_hour takes their place."
    return f"{table(rows)}\n\n{note}"


def step_cost(measured: Measured, loop: LoopPlan, teacher: bool) -> StepCost:
    """Return the measured cost of a step; the teacher's forward, if a loss needs it, counts while its cache fills."""
    share = loop.teacher_share if teacher else 0.0
    return StepCost(
        fixed=measured.fixed,
        image=measured.step + share * measured.teacher,
        backward=max(0.0, measured.step - measured.score),
        load=measured.load,
        gradient_mib=measured.gradient_mib,
        gflop=measured.gflop + share * measured.teacher_gflop,
        kernels=measured.kernels,
    )


def of_run(path: Path, cost: StepCost, trust: bool = False) -> tuple[StepCost, str]:
    """Return the cost of a step as a run measured it on its devices, and a line about it."""
    run = read(path, -1, trust=trust)
    if not run.images_per_second:
        raise ConfigError("--run", f"'{path}' has no training rows yet", "", "Give a run that has trained")
    devices = int(run.manifest.get("world_size", 1))
    image = 1000 * devices / run.images_per_second
    origin = f"step      of run '{run.name}': {run.images_per_second:.0f} images/s on {devices} device(s)"
    return replace(cost, fixed=0.0, image=image, backward=image * cost.backward / cost.image), origin


def _table(lines: Sequence[Line], instance: Instance) -> str:
    rows = [
        {
            "machines": one.machines,
            "devices": one.devices,
            "step, ms": f"{one.step_ms:.2f}",
            "compute": f"{one.compute_ms:.2f}",
            "not hidden communication": f"{one.exposed_ms:.3f}",
            "loading": f"{one.load_ms:.2f}",
            "efficiency": percent(one.efficiency),
            "h an epoch": f"{one.hours_epoch:.4g}",
            "hours": f"{one.hours:.4g}",
            "USD": money(one.usd),
        }
        for one in lines
    ]
    return f"{instance.name}, USD {instance.per_hour:g} an hour for one\n\n{table(rows)}"


def _assumptions(last: Line, here: StepCost, instance: Instance, job: Job) -> list[str]:
    bound = "loading" if last.load_ms >= last.compute_ms + last.exposed_ms else "the step"
    loading = f"{here.load:.2f} ms an image in one process" if here.load else "not measured: there are no images yet"
    return [
        f"gradient  {here.gradient_mib:.1f} MiB a step; a ring all-reduce takes {last.communication_ms:.3f} ms on "
        f"{last.devices} devices; all but its last {BUCKET_MIB:g} MiB hide behind the backward pass",
        f"links     {instance.link_gb_s:g} GB/s inside a machine, {instance.network_gbit_s:g} Gbit/s between machines, "
        f"{1000 * LATENCY_MS:g} us a hop (assumptions, from product pages)",
        f"loading   {loading}; {instance.vcpus / 2:g} cores a machine, each as fast as one here",
        f"bound by  {bound}, on {last.devices} devices",
        f"batch     {job.batch_size} images a step, divided over all devices; "
        f"{job.images} images, {job.epochs:.3g} epochs",
        "left out  fitting the teacher, evaluations, set-up, stragglers; one device costs its whole machine",
    ]

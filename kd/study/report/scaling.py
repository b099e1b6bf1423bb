"""How long a step takes on N devices, and what a run then costs: arithmetic alone.

docs/report.md has the model as formulas. DDP reduces a bucket of 25 MiB as soon as its gradients are there. All but the
last bucket overlap with the backward pass of the last micro-batch; the last one, `tail`, has nothing left to overlap.
Not modelled: stragglers, a network that other jobs share, and small kernels that leave a part of a device idle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kd.config.instances import Instance

BUCKET_MIB = 25.0  # of DDP, torch's default
LATENCY_MS = 0.02  # of one hop of a ring: an assumption
LAUNCH_MS = 0.006  # of starting one kernel: an assumption
MFU = 0.35  # share of a device's peak rate that training reaches where nothing was measured on it: an assumption


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step costs on one device; times in milliseconds."""

    fixed: float  # of a micro-batch, however small: launches, the optimizer
    image: float  # of an image: teacher, student forward and backward
    backward: float  # the part of `image` that is the student's backward pass
    load: float  # of loading an image in one process
    gradient_mib: float  # what ranks reduce each step
    launch: float = 0.0  # what a micro-batch takes at least, since the host must start so many kernels
    gflop: float = 0.0  # arithmetic of an image, GFLOP; 0: not counted
    kernels: int = 0  # operators of a micro-batch; 0: not counted


@dataclass(frozen=True, slots=True)
class Line:
    """One number of devices."""

    machines: int
    devices: int
    compute_ms: float
    communication_ms: float
    exposed_ms: float  # the part of the communication that nothing hides
    load_ms: float
    step_ms: float
    efficiency: float  # time of one device / (time of this line x devices)
    hours_epoch: float
    hours: float
    usd: float  # 0: no price is known


def on(instance: Instance, cost: StepCost, mfu: float = MFU) -> StepCost:
    """Return what a step costs on a device of this kind, from its arithmetic and an assumed share of the peak rate."""
    image = cost.gflop / (instance.tflops * mfu)  # GFLOP / (TFLOP/s) = ms
    backward = image * cost.backward / cost.image
    return replace(cost, fixed=0.0, image=image, backward=backward, launch=LAUNCH_MS * cost.kernels)


def all_reduce_ms(mib: float, devices: int, machines: int, instance: Instance) -> float:
    """Return the milliseconds of reducing so many MiB of gradients over machines with so many devices each."""
    buckets = -(-mib // BUCKET_MIB)
    hops = 2 * (devices - 1 + machines - 1)
    time = LATENCY_MS * buckets * hops
    for count, rate in ((devices, instance.link_gb_s), (machines, instance.network_gbit_s / 8)):
        if count > 1:
            time += 2 * (count - 1) / count * mib * 2**20 / (rate * 1e6)  # bytes / (GB/s) in ms
    return time


def exposed_ms(communication: float, mib: float, backward: float) -> float:
    """Return the part of the communication that the backward pass of the last micro-batch does not hide."""
    tail = communication * min(1.0, BUCKET_MIB / mib) if mib else 0.0
    return tail + max(0.0, communication - tail - backward)


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be trained."""

    images: int  # of an epoch
    epochs: float
    batch_size: int
    micro_batch: int = 0  # images of a forward on one device at most; 0: a device's whole share


def line(job: Job, cost: StepCost, instance: Instance, machines: int, devices: int = 0) -> Line:
    """Return time and cost of a job whose batch is divided over machines with so many devices each; 0: all of them."""
    devices = devices or instance.devices
    count = machines * devices
    share = job.batch_size / count
    micro = min(job.micro_batch or share, share)
    compute = share / micro * max(cost.launch, cost.fixed + cost.image * micro)
    communication = all_reduce_ms(cost.gradient_mib, devices, machines, instance) if count > 1 else 0.0
    exposed = exposed_ms(communication, cost.gradient_mib, cost.backward * micro)
    load = cost.load * share / max(1.0, instance.vcpus / 2 / devices)
    step = max(compute + exposed, load) if instance.tflops else compute + exposed + load
    alone = step if count == 1 else line(job, cost, instance, 1, 1).step_ms
    hours_epoch = job.images / job.batch_size * step / 3.6e6
    return Line(
        machines=machines,
        devices=count,
        compute_ms=compute,
        communication_ms=communication,
        exposed_ms=exposed,
        load_ms=load,
        step_ms=step,
        efficiency=alone / (step * count),
        hours_epoch=hours_epoch,
        hours=hours_epoch * job.epochs,
        usd=hours_epoch * job.epochs * machines * instance.per_hour,
    )


def sizes(instance: Instance, machines: int) -> list[tuple[int, int]]:
    """Return (machines, devices of each) to show: one device, one machine, then doubled up to all."""
    counts = [2**power for power in range(machines.bit_length()) if 2**power < machines]
    return list(dict.fromkeys([(1, 1), *((count, instance.devices) for count in [*counts, machines])]))

"""Know rented machines: their prices, and whether the cores feed the accelerators.

On-demand list prices of SageMaker training in us-east-1 on 2026-09-27, from the AWS
Price List API (`AmazonSageMaker` offer file) as a public notebook toolkit recorded
them; that of ml.p3.2xlarge is from AWS's post on heterogeneous clusters (2022).
`price.per_hour` of a configuration overrides them. Accelerators, vCPUs and GiB of
memory are those of EC2, as torchx and Red Hat's documentation list them (read 2026-11);
of p5.4xlarge, g6 and c7i they were not looked up.
"""

import math
from typing import NamedTuple

from kd.core.errors import ConfigError, did_you_mean
from kd.core.text import format_dollars

PRICED_ON = "2026-09-27"  # date of the prices
DATA_HOST = "ml.c5.18xlarge"  # the type that a plan proposes for a data group


class Instance(NamedTuple):
    """A row of the table."""

    usd: float  # per hour
    accelerators: int  # GPUs, or chips of Trainium
    vcpus: int  # two for each core
    gib: int

    @property
    def cores(self) -> int:
        return self.vcpus // 2


TABLE = {
    "ml.p5.48xlarge": Instance(63.296, 8, 192, 2048),
    "ml.p5.4xlarge": Instance(7.912, 1, 16, 256),
    "ml.p4de.24xlarge": Instance(31.5641, 8, 96, 1152),
    "ml.p4d.24xlarge": Instance(25.2513, 8, 96, 1152),
    "ml.p3.2xlarge": Instance(3.825, 1, 8, 61),
    "ml.g6e.48xlarge": Instance(37.66, 8, 192, 1536),
    "ml.g6e.xlarge": Instance(2.61, 1, 4, 32),
    "ml.g6.48xlarge": Instance(16.688, 8, 192, 768),
    "ml.g6.xlarge": Instance(1.127, 1, 4, 16),
    "ml.g5.48xlarge": Instance(20.36, 8, 192, 768),
    "ml.g5.12xlarge": Instance(7.09, 4, 48, 192),
    "ml.g5.xlarge": Instance(1.41, 1, 4, 16),
    "ml.g4dn.xlarge": Instance(0.7364, 1, 4, 16),
    "ml.trn1.32xlarge": Instance(24.73, 16, 128, 512),
    "ml.trn1.2xlarge": Instance(1.54, 1, 8, 32),
    "ml.c7i.8xlarge": Instance(1.714, 0, 32, 64),
    "ml.c5.18xlarge": Instance(3.672, 0, 72, 144),
    "ml.c5.9xlarge": Instance(1.836, 0, 36, 72),
}


def find_machine(name: str) -> tuple[str, Instance] | None:
    """Return full name and row of a machine in the table, named with `ml.` or not."""
    full = name if name in TABLE else f"ml.{name}"
    return (full, TABLE[full]) if full in TABLE else None


def price_per_hour(name: str) -> float:
    """Return the list price of a machine, or 0 if it is not in the table."""
    machine = find_machine(name)
    return machine[1].usd if machine else 0.0


def require_machine(name: str, option: str) -> tuple[str, Instance]:
    """Return full name and row of the machine that a command's option names."""
    machine = find_machine(name)
    if machine is None:
        wrong = f"is {name}, which is not in the table of {PRICED_ON}"
        remedy = f"{did_you_mean(name, TABLE)} Without --view-ms any type is taken"
        raise ConfigError(option, wrong, f"One of {', '.join(TABLE)}", remedy.lstrip())
    return machine


def speed_and_saving(
    before: tuple[float, float], after: tuple[float, float]
) -> tuple[float, float]:
    """Return how many times as fast `after` is, and the share of the cost it saves.

    Both are (USD per hour, time of the same work).
    """
    faster = before[1] / after[1]
    return faster, 1 - after[0] / before[0] / faster


def core_plan(
    name: str,
    count: int,
    view_ms: float,
    rate: float = 0.0,
    group: tuple[str, int] | None = None,
    usd: float = 0.0,
) -> list[str]:
    """Return lines on whether the cores of `count` machines feed their accelerators.

    `view_ms`: milliseconds of one core per view. `rate`: images/s of the student per
    accelerator; 0: not known. `group`: a data group; without one, the smallest that is
    enough is proposed. `usd`: the price per hour of a machine without a data group; 0:
    its list price. Not handled: the time that a network or a disk adds.
    """
    name, machine = require_machine(name, "--instance")
    if not machine.accelerators:
        raise ConfigError(
            "--instance",
            f"is {name}, which has no accelerator",
            "A type with one",
            "Choose another",
        )
    accelerators = count * machine.accelerators
    cores = count * machine.cores
    loaded = 1000 * cores / view_ms  # images/s
    each = f"{loaded / accelerators:,.0f} images/s"
    if not rate:
        return [
            f"loading   {count} x {name} with {cores} cores load {each} for each of"
            f" {accelerators} accelerators at {view_ms:g} ms per view"
        ]
    trained = accelerators * rate
    need = math.ceil(trained * view_ms / 1000)
    verdict = "enough" if need <= cores else "too few"
    lines = [
        f"loading   {accelerators} x {rate:,.0f} images/s need {need} cores at"
        f" {view_ms:g} ms per view; {name} has {cores} ({count * machine.vcpus} vCPUs):"
        f" {verdict}, as they load {each} per accelerator"
    ]
    if need <= cores and group is None:
        return lines
    family = name[: name.rindex(".") + 1]  # such as `ml.g5.`: the same accelerator
    ratio, best = max(
        (row.cores / row.accelerators, kind)
        for kind, row in TABLE.items()
        if kind.startswith(family)
    )
    if need > cores and ratio > cores / accelerators:
        lines.append(
            f"ratio     {best} has {ratio:g} cores per accelerator instead of"
            f" {cores / accelerators:g}"
        )
    kind, hosts = group or (
        DATA_HOST,
        math.ceil((need - cores) / TABLE[DATA_HOST].cores),
    )
    kind, data_host = require_machine(kind, "--data-group")
    data_cores = hosts * data_host.cores
    data_usd = hosts * data_host.usd
    hourly = count * (usd or machine.usd)
    loaded_by_all = 1000 * (cores + data_cores) / view_ms
    dearer = 1 + data_usd / hourly
    faster, saved = speed_and_saving(
        (hourly, 1 / min(loaded, trained)),
        (hourly * dearer, 1 / min(loaded_by_all, trained)),
    )
    lines.append(
        f"data      --data-group {kind}:{hosts} brings {data_cores} cores for USD"
        f" {format_dollars(data_usd)} an hour ({dearer:.2f} times the price), and"
        " pays from"
        f" {loaded * dearer / accelerators:,.0f} images/s per accelerator on"
    )
    if loaded_by_all < trained:
        lines.append(
            f"data      that is still too few: {cores + data_cores} of {need} cores"
        )
    if group is None:
        lines.append("data      a data group needs data.store=none")
    cost = f"{100 * abs(saved):.0f} % {'cheaper' if saved > 0 else 'dearer'} per image"
    lines.append(f"data      here it is {faster:.2f} times as fast and {cost}")
    return lines

"""Know rented machines: their prices, and which plan of them feeds the accelerators.

The table has all sizes of its families that SageMaker trains on. Prices are on-demand
list prices of training in us-east-1 on 2026-09-27, from the AWS Price List API
(`AmazonSageMaker` offer file) as a public notebook toolkit recorded them with vCPUs and
GiB; a second project records the same for g5, g6 and g6e in us-west-2. Prices of p3 are
older: AWS's post on heterogeneous clusters (2022) and a copy of the price page. The
price of trn1n is not known. `price.per_hour` of a configuration overrides them.
Accelerators are EC2's, as torchx and Red Hat's documentation list them (read 2026-11).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from kd.config.bill import Bill
from kd.core.errors import ConfigError, did_you_mean
from kd.core.text import format_dollars

PRICED_ON = "2026-09-27"  # date of the prices
DATA_HOST = "ml.c5.18xlarge"  # the type of a data group of several hosts


class Instance(NamedTuple):
    """A row of the table."""

    usd: float  # per hour; 0: not known
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
    "ml.p3.16xlarge": Instance(28.152, 8, 64, 488),
    "ml.p3.8xlarge": Instance(14.688, 4, 32, 244),
    "ml.p3.2xlarge": Instance(3.825, 1, 8, 61),
    "ml.g6e.48xlarge": Instance(37.66, 8, 192, 1536),
    "ml.g6e.24xlarge": Instance(18.83, 4, 96, 768),
    "ml.g6e.12xlarge": Instance(13.12, 4, 48, 384),
    "ml.g6e.16xlarge": Instance(9.47, 1, 64, 512),
    "ml.g6e.8xlarge": Instance(5.66, 1, 32, 256),
    "ml.g6e.4xlarge": Instance(3.76, 1, 16, 128),
    "ml.g6e.2xlarge": Instance(2.8, 1, 8, 64),
    "ml.g6e.xlarge": Instance(2.61, 1, 4, 32),
    "ml.g6.48xlarge": Instance(16.688, 8, 192, 768),
    "ml.g6.24xlarge": Instance(8.344, 4, 96, 384),
    "ml.g6.12xlarge": Instance(5.752, 4, 48, 192),
    "ml.g6.16xlarge": Instance(4.246, 1, 64, 256),
    "ml.g6.8xlarge": Instance(2.518, 1, 32, 128),
    "ml.g6.4xlarge": Instance(1.654, 1, 16, 64),
    "ml.g6.2xlarge": Instance(1.222, 1, 8, 32),
    "ml.g6.xlarge": Instance(1.127, 1, 4, 16),
    "ml.g5.48xlarge": Instance(20.36, 8, 192, 768),
    "ml.g5.24xlarge": Instance(10.18, 4, 96, 384),
    "ml.g5.12xlarge": Instance(7.09, 4, 48, 192),
    "ml.g5.16xlarge": Instance(5.12, 1, 64, 256),
    "ml.g5.8xlarge": Instance(3.06, 1, 32, 128),
    "ml.g5.4xlarge": Instance(2.03, 1, 16, 64),
    "ml.g5.2xlarge": Instance(1.52, 1, 8, 32),
    "ml.g5.xlarge": Instance(1.41, 1, 4, 16),
    "ml.g4dn.12xlarge": Instance(4.89, 4, 48, 192),
    "ml.g4dn.16xlarge": Instance(5.44, 1, 64, 256),
    "ml.g4dn.8xlarge": Instance(2.72, 1, 32, 128),
    "ml.g4dn.4xlarge": Instance(1.505, 1, 16, 64),
    "ml.g4dn.2xlarge": Instance(0.94, 1, 8, 32),
    "ml.g4dn.xlarge": Instance(0.7364, 1, 4, 16),
    "ml.trn1n.32xlarge": Instance(0.0, 16, 128, 512),
    "ml.trn1.32xlarge": Instance(24.73, 16, 128, 512),
    "ml.trn1.2xlarge": Instance(1.54, 1, 8, 32),
    "ml.c7i.48xlarge": Instance(10.282, 0, 192, 384),
    "ml.c7i.24xlarge": Instance(5.141, 0, 96, 192),
    "ml.c7i.16xlarge": Instance(3.427, 0, 64, 128),
    "ml.c7i.12xlarge": Instance(2.57, 0, 48, 96),
    "ml.c7i.8xlarge": Instance(1.714, 0, 32, 64),
    "ml.c7i.4xlarge": Instance(0.857, 0, 16, 32),
    "ml.c7i.2xlarge": Instance(0.428, 0, 8, 16),
    "ml.c7i.xlarge": Instance(0.214, 0, 4, 8),
    "ml.c7i.large": Instance(0.107, 0, 2, 4),
    "ml.c5.18xlarge": Instance(3.672, 0, 72, 144),
    "ml.c5.9xlarge": Instance(1.836, 0, 36, 72),
    "ml.c5.4xlarge": Instance(0.816, 0, 16, 32),
    "ml.c5.2xlarge": Instance(0.408, 0, 8, 16),
    "ml.c5.xlarge": Instance(0.204, 0, 4, 8),
}


def _family(name: str) -> str:
    """Return the part of a name before its size: `ml.g5` of ml.g5.xlarge."""
    return name.rpartition(".")[0]


def _sizes(names: Iterable[str]) -> str:
    return f"A size of {', '.join(dict.fromkeys(map(_family, names)))}"


KNOWN = _sizes(TABLE)
PRICED = _sizes(name for name, machine in TABLE.items() if machine.usd)


def find_machine(name: str) -> tuple[str, Instance] | None:
    """Return full name and row of a machine in the table, named with `ml.` or not."""
    full = name if name in TABLE else f"ml.{name}"
    return (full, TABLE[full]) if full in TABLE else None


def price_per_hour(name: str) -> float:
    """Return the list price of a machine, or 0 if it is not known."""
    machine = find_machine(name)
    return machine[1].usd if machine else 0.0


def require_machine(name: str, option: str) -> tuple[str, Instance]:
    """Return full name and row of the machine that a command's option names."""
    machine = find_machine(name)
    if machine is None:
        wrong = f"is {name}, which is not in the table of {PRICED_ON}"
        remedy = f"{did_you_mean(name, TABLE)} Without --view-ms any type is taken"
        raise ConfigError(option, wrong, KNOWN, remedy.lstrip())
    return machine


class Plan(NamedTuple):
    """Machines that train, and hosts that only decode."""

    kind: str
    count: int
    usd: float = 0.0  # per hour of a machine that trains; 0: its list price
    data_kind: str = DATA_HOST
    hosts: int = 0

    @property
    def accelerators(self) -> int:
        return self.count * TABLE[self.kind].accelerators

    @property
    def cores(self) -> int:
        data_cores = self.hosts * TABLE[self.data_kind].cores
        return self.count * TABLE[self.kind].cores + data_cores

    @property
    def per_hour(self) -> float:
        """US dollars for all machines; 0: not known."""
        training = self.count * (self.usd or TABLE[self.kind].usd)
        return training and training + self.hosts * TABLE[self.data_kind].usd

    def __str__(self) -> str:
        group = f" with --data-group {self.data_kind}:{self.hosts}"
        return f"{self.count} x {self.kind}{group if self.hosts else ''}"

    def bill(self, rate: float, view_ms: float) -> Bill:
        """Return the bill of an image, if accelerators train `rate` images/s in all."""
        return Bill(1 / min(rate, self.loaded(view_ms)), self.per_hour)

    def loaded(self, view_ms: float) -> float:
        """Return the images/s that all cores load."""
        return 1000 * self.cores / view_ms


def core_plan(
    name: str,
    count: int,
    view_ms: float,
    rate: float = 0.0,
    group: tuple[str, int] | None = None,
    usd: float = 0.0,
) -> list[str]:
    """Return lines on whether the cores of `count` machines feed their accelerators.

    If not, they name the cheapest plans that do: see `_plans`.

    `view_ms`: milliseconds of one core per view. `rate`: images/s of the student per
    accelerator; 0: not known. `group`: a data group that replaces the proposed one.
    `usd`: the price per hour of a machine without a data group; 0: its list price.
    Not handled: the time that a network or a disk adds.
    """
    name, machine = require_machine(name, "--instance")
    if not machine.accelerators:
        raise ConfigError(
            "--instance",
            f"is {name}, which has no accelerator",
            "A type with one",
            "Choose another",
        )
    present = Plan(name, count, usd)
    loaded = f"{present.loaded(view_ms) / present.accelerators:,.0f} images/s"
    if not rate:
        return [
            f"loading   {present} with {present.cores} cores load {loaded} for each of"
            f" {present.accelerators} accelerators at {view_ms:g} ms per view"
        ]
    trained = present.accelerators * rate
    need = math.ceil(trained * view_ms / 1000)
    enough = need <= present.cores
    lines = [
        f"loading   {present.accelerators} x {rate:,.0f} images/s need {need} cores at"
        f" {view_ms:g} ms per view; {name} has {present.cores}"
        f" ({count * machine.vcpus} vCPUs): {'enough' if enough else 'too few'}, as"
        f" they load {loaded} per accelerator"
    ]
    plans = [] if enough else _plans(present, need)
    if group is not None:
        kind, _ = require_machine(group[0], "--data-group")
        plans = [plan for plan in plans if not plan.hosts]
        plans.append(present._replace(data_kind=kind, hosts=group[1]))
    for plan in plans:
        lines.append(_plan_line(present, plan, trained, view_ms))
        if plan.cores < need:
            lines.append(f"data      that is too few: {plan.cores} of {need} cores")
        elif plan.hosts and group is None:
            lines.append("data      a data group needs data.store=none")
    if plans:
        dated = f"{PRICED_ON} (p3: older)"
        lines.append(f"prices    list prices on demand of {dated}, us-east-1")
    return lines


def _plans(present: Plan, need: int) -> list[Plan]:
    """Return the cheapest size with `need` cores, and a data group if it is cheaper.

    Each has the present accelerators on no more machines, since gradients between
    machines take longer. AWS's post on heterogeneous clusters (2022) tries another size
    first, too. A group is one host, or several `DATA_HOST`.
    """
    sizes = [
        Plan(kind, count, present.usd if kind == present.kind else 0.0)
        for kind, row in TABLE.items()
        if _family(kind) == _family(present.kind)
        for count, remainder in [divmod(present.accelerators, row.accelerators)]
        if remainder == 0 and count <= present.count
    ]
    grouped = [
        plan
        for size in sizes
        if size.cores < need
        for kind, row in TABLE.items()
        if not row.accelerators
        for hosts in [math.ceil((need - size.cores) / row.cores)]
        for plan in [size._replace(data_kind=kind, hosts=hosts)]
        if hosts == 1 or kind == DATA_HOST
    ]
    single = sorted((size for size in sizes if size.cores >= need), key=_rank)[:1]
    return single + [
        plan
        for plan in sorted(grouped, key=_rank)[:1]
        if not single or _rank(plan) < _rank(single[0])
    ]


def _rank(plan: Plan) -> tuple[float, float]:
    """Return the price in cents, the last if not known, and that of the data group."""
    data_usd = plan.hosts * TABLE[plan.data_kind].usd
    return round(100 * plan.per_hour) or math.inf, data_usd


def _plan_line(present: Plan, plan: Plan, trained: float, view_ms: float) -> str:
    """Return a line on cores, price and speed of a plan, against the present machines.

    `trained`: images/s of all accelerators. Another size is compared at list prices.
    """
    before = present if plan.kind == present.kind else present._replace(usd=0.0)
    old, new = (each.bill(trained, view_ms) for each in (before, plan))
    line = f"{'data' if plan.hosts else 'size':9} {plan} has {plan.cores} cores"
    faster = f"{new.speed_up(old):.2f} times as fast"
    saved = new.saving(old)
    if saved is None:
        return f"{line} and is {faster}; its price is not known: set price.per_hour"
    dearer = plan.per_hour / before.per_hour
    edge = dearer * before.loaded(view_ms) / plan.accelerators
    return (
        f"{line} for USD {format_dollars(plan.per_hour)} an hour instead of"
        f" {format_dollars(before.per_hour)}: {faster} and {100 * abs(saved):.0f} %"
        f" {'cheaper' if saved > 0 else 'dearer'} per image; it pays from"
        f" {edge:,.0f} images/s per accelerator on"
    )

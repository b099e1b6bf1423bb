"""Bills and plans of rented machines, against the figures that AWS and KT published.

Sources: AWS's posts on heterogeneous clusters (2022) and on Trainium, and KT's on
distilling a ViT on SageMaker.
"""

import re
from pathlib import Path

import pytest

from kd import config
from kd.config import instances
from kd.config.bill import Bill
from kd.config.instances import TABLE, Plan, core_plan
from kd.core.errors import ConfigError

PAGE = (Path(__file__).parents[3] / "docs" / "sagemaker.md").read_text()
MS = 100 / 3_600_000  # hours of 100 steps for a millisecond a step
TENSORFLOW = (Bill(192 * MS, 37.688), Bill(86 * MS, 45.032))
PYTORCH = (Bill(1193 * MS, 3.825), Bill(184 * MS, 5.661))
TRAINIUM = (Bill(6553 / 3600, 37.69), Bill(6033 / 3600, 24.725))
KT = (Bill(3.2, 1.0, 2), Bill(0.11, 1.0, 32))  # hours of an epoch, GPUs of one price


@pytest.mark.parametrize(
    ("bills", "usd", "faster", "cheaper"),
    [
        pytest.param(TENSORFLOW, (0.201, 0.108), 2.2, 0.46, id="TensorFlow"),
        pytest.param(PYTORCH, (0.127, 0.029), 6.5, 0.77, id="PyTorch"),
        pytest.param(TRAINIUM, (68.6, 41.47), 1.09, 0.395, id="Trainium"),
        pytest.param(KT, (6.4, 3.52), 29, 1 - 16 / 29, id="KT"),
    ],
)
def test_bills_are_those_of_the_published_tables(bills, usd, faster, cheaper):
    """The costs of KT are GPU hours: 16 times the GPUs, 29 times as fast."""
    before, after = bills
    assert [bill.usd for bill in bills] == pytest.approx(usd, rel=1e-3, abs=6e-4)
    assert after.speed_up(before) == pytest.approx(faster, rel=0.02)
    assert after.saving(before) == pytest.approx(cheaper, abs=0.01)


def test_an_unknown_price_saves_nothing_known():
    assert Bill(1.0, 0.0).saving(Bill(2.0, 3.0)) is None
    assert Bill(1.0, 3.0).saving(Bill(2.0, 0.0)) is None
    assert Bill(1.0, 3.0).saving(Bill(2.0, 1.0)) == pytest.approx(-0.5)


def test_the_table_has_all_sizes_that_sagemaker_trains_on():
    """By botocore's model of the service; an instance has no more than it may have."""
    botocore = pytest.importorskip("botocore.session")  # test-floor has no sagemaker
    service = botocore.Session().get_service_model("sagemaker")
    sizes = service.shape_for("TrainingInstanceType").enum
    families = {name.rpartition(".")[0] for name in TABLE}
    assert set(TABLE) == {name for name in sizes if name.rpartition(".")[0] in families}
    assert [name for name, machine in TABLE.items() if not machine.usd] == [
        "ml.trn1n.32xlarge"
    ]


@pytest.mark.parametrize("family", ["ml.g4dn", "ml.g5", "ml.g6", "ml.g6e"])
def test_a_size_has_the_vcpus_of_its_name(family):
    """A 4xlarge has 16 vCPUs, and one accelerator costs more with more of them."""
    single = [
        (machine.vcpus, machine.usd)
        for name, machine in TABLE.items()
        if name.startswith(f"{family}.") and machine.accelerators == 1
    ]
    assert sorted(single) == sorted(single, key=lambda pair: pair[1])
    assert len(single) == 5
    for name, machine in TABLE.items():
        if name.startswith(f"{family}."):
            times = re.search(r"\.(\d*)xlarge", name)[1] or "1"
            assert machine.vcpus == 4 * int(times)


def test_the_plan_gives_the_published_ratio_of_a_job_that_waited_for_its_data():
    """Where the accelerators take 86 ms a step and 48 cores 192, and two hosts are
    enough, it is the table's row.
    """
    batch = 8192
    view_ms = 48 * 192 / batch
    rate = batch / 0.086 / 8
    job = ("ml.p4d.24xlarge", 1, view_ms)
    group = ("ml.c5.18xlarge", 2)
    line = core_plan(*job, rate, group, 37.688)[1]
    assert "USD 45.03 an hour instead of 37.69" in line
    assert "2.23 times as fast and 46 % cheaper" in line
    edge = float(re.search(r"pays from ([\d,]+) images/s", line)[1].replace(",", ""))
    assert "and 0 % " in core_plan(*job, edge, group, 37.688)[1]


@pytest.mark.parametrize(
    ("name", "count", "need", "size"),
    [
        # AWS's post: another ratio of vCPUs to GPUs before a second group
        ("ml.g5.xlarge", 1, 3, "1 x ml.g5.2xlarge"),
        ("ml.g5.xlarge", 1, 16, "1 x ml.g5.8xlarge"),
        ("ml.g5.xlarge", 1, 32, "1 x ml.g5.16xlarge"),
        ("ml.g5.12xlarge", 1, 40, "1 x ml.g5.24xlarge"),
        ("ml.g4dn.2xlarge", 2, 30, "2 x ml.g4dn.8xlarge"),
        # eight machines of 5.12 an hour cost twice as much as one of 20.36
        ("ml.g5.xlarge", 8, 96, "1 x ml.g5.48xlarge"),
        # no size of these has more cores for an accelerator on as few machines
        ("ml.p4d.24xlarge", 1, 101, ""),
        ("ml.g5.48xlarge", 1, 101, ""),
        ("ml.g5.xlarge", 1, 33, ""),
    ],
)
def test_another_size_comes_first_and_the_cheapest_that_is_enough(
    name, count, need, size
):
    """A data group is named beside a size only if it is cheaper."""
    accelerators = count * TABLE[name].accelerators
    first, *lines = core_plan(name, count, 10.0, 100.0 * need / accelerators)
    assert f"need {need} cores" in first
    prices = {
        line.split()[0]: float(match[1])
        for line in lines
        if (match := re.search(r" for USD ([\d.]+) an hour", line))
    }
    assert size in lines[0]
    assert ("size" in prices) == bool(size)
    assert prices.get("data", 0.0) < prices.get("size", float("inf"))
    assert prices


def test_no_plan_of_the_table_is_cheaper():
    """Every group of one host, and of any number of the usual type, is tried."""
    need = 39
    line = core_plan("ml.g5.xlarge", 1, 30.0, 1300.0)[1]
    price = float(re.search(r"for USD ([\d.]+) an hour", line)[1])
    tried = [
        Plan(kind, 1, 0.0, data_kind, hosts)
        for kind in TABLE
        if kind.startswith("ml.g5.") and TABLE[kind].accelerators == 1
        for data_kind in TABLE
        if not TABLE[data_kind].accelerators
        for hosts in range(4)
        if hosts < 2 or data_kind == instances.DATA_HOST
    ]
    cheapest = min(plan.per_hour for plan in tried if plan.cores >= need)
    assert price == pytest.approx(cheapest, abs=0.005)


def test_a_plan_without_a_price_says_so():
    """Also where the configuration gives the price of one machine."""
    lines = core_plan("trn1n.32xlarge", 1, 30.0, 300.0)
    assert "2.25 times as fast; its price is not known" in lines[1]
    assert "USD" not in lines[1]
    few = core_plan("trn1n.32xlarge", 1, 30.0, 135.0)[1]  # 65 cores, of which 64 exist
    assert "--data-group ml.c7i.large:1" in few
    priced = core_plan("trn1n.32xlarge", 1, 30.0, 300.0, usd=30.0)[1]
    assert "instead of 30.00" in priced


def test_a_machine_without_a_price_needs_one_for_a_report(settings):
    machine = "price.instance=ml.trn1n.32xlarge"
    with pytest.raises(
        ConfigError, match=r"price kd does not know.*price\.per_hour"
    ) as caught:
        config.load(settings, [machine])
    assert "ml.trn1," in str(caught.value)
    assert "ml.trn1n," not in str(caught.value)  # of which no size has a price
    assert "Did you mean" not in str(caught.value)
    config.load(settings, [machine, "price.per_hour=30"])


def test_an_unknown_size_is_refused_with_the_families():
    with pytest.raises(ConfigError, match=r"ml\.g5, ml\.g4dn.*Did you mean"):
        core_plan("ml.g5.3xlarge", 1, 3.0)


def today(published, names, hosts=("", 0)):
    """Return the saving of published times at the prices of the table."""
    before, after = (
        bill._replace(per_hour=TABLE[name].usd)
        for bill, name in zip(published, names, strict=True)
    )
    data_usd = hosts[1] * TABLE[hosts[0]].usd if hosts[1] else 0.0
    return after._replace(per_hour=after.per_hour + data_usd).saving(before)


@pytest.mark.parametrize(
    ("bills", "names", "hosts"),
    [
        (TRAINIUM, ("ml.p4d.24xlarge", "ml.trn1.32xlarge"), ("", 0)),
        (TENSORFLOW, ("ml.p4d.24xlarge",) * 2, ("ml.c5.18xlarge", 2)),
        (PYTORCH, ("ml.p3.2xlarge",) * 2, ("ml.c5.9xlarge", 1)),
    ],
    ids=["Trainium", "TensorFlow", "PyTorch"],
)
def test_the_page_says_what_the_published_times_cost_today(bills, names, hosts):
    before, after = bills
    cells = (
        f"| {after.speed_up(before):.2f} "
        f"| {100 * after.saving(before):.0f} % "
        f"| {100 * today(bills, names, hosts):.0f} % |"
    )
    machines = {*names, *filter(None, [hosts[0]])}
    (row,) = [
        line
        for line in PAGE.splitlines()
        if line.endswith(cells) and all(name in line for name in machines)
    ]
    assert row.startswith("|")


def test_the_page_gives_the_prices_of_the_table_and_their_date():
    p4d, trn1 = (TABLE[name].usd for name in ("ml.p4d.24xlarge", "ml.trn1.32xlarge"))
    own, rented = KT
    cluster = Bill(24.0, p4d, 4).usd
    for text in (
        instances.PRICED_ON,
        f"USD {trn1} against {p4d} an hour",
        f"{100 * (1 - p4d / TRAINIUM[0].per_hour):.0f} % cheaper",
        f"{100 * rented.saving(own):.0f} % fewer GPU hours",
        f"USD {cluster:,.0f} today",
        f"USD {cluster / 960 / 2:.2f} an hour for a GPU",
    ):
        assert text in PAGE

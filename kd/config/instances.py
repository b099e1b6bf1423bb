"""Machines that can be rented: what an hour costs, how many devices they have, how these are linked.

Prices are on-demand list prices of SageMaker training in us-east-1 on 2026-09-27, from the AWS Price List API
(`AmazonSageMaker` offer file) as a public notebook toolkit recorded them. `price.per_hour` of a configuration takes
their place. Devices, peak rates and links are those of AWS's and NVIDIA's product pages; nothing here was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

PRICED_ON = "2026-09-27"  # the day of the prices


@dataclass(frozen=True, slots=True)
class Instance:
    """A kind of machine."""

    name: str
    per_hour: float  # USD for one machine
    devices: int  # accelerators; 1 where there is only a CPU. A Trainium chip counts as two: its cores.
    tflops: float  # peak of one device in bfloat16 (T4: float16) without sparsity, TFLOP/s; 0: a CPU
    link_gb_s: float  # what one device sends to the others of its machine, one direction, GB/s; 0: it is alone
    network_gbit_s: float  # network of the machine, Gbit/s
    vcpus: int  # two a core


TABLE = {
    row.name: row
    for row in (
        Instance("ml.p5.48xlarge", 63.296, 8, 989.0, 450.0, 3200.0, 192),
        Instance("ml.p5.4xlarge", 7.912, 1, 989.0, 0.0, 100.0, 16),
        Instance("ml.p4de.24xlarge", 31.5641, 8, 312.0, 300.0, 400.0, 96),
        Instance("ml.p4d.24xlarge", 25.2513, 8, 312.0, 300.0, 400.0, 96),
        Instance("ml.g6e.48xlarge", 37.66, 8, 362.0, 16.0, 400.0, 192),
        Instance("ml.g6e.xlarge", 2.61, 1, 362.0, 0.0, 20.0, 4),
        Instance("ml.g6.48xlarge", 16.688, 8, 121.0, 16.0, 100.0, 192),
        Instance("ml.g6.xlarge", 1.127, 1, 121.0, 0.0, 10.0, 4),
        Instance("ml.g5.48xlarge", 20.36, 8, 70.0, 16.0, 100.0, 192),
        Instance("ml.g5.12xlarge", 7.09, 4, 70.0, 16.0, 40.0, 48),
        Instance("ml.g5.xlarge", 1.41, 1, 70.0, 0.0, 10.0, 4),
        Instance("ml.g4dn.xlarge", 0.7364, 1, 65.0, 0.0, 25.0, 4),
        Instance("ml.trn1.32xlarge", 24.73, 32, 95.0, 96.0, 800.0, 128),
        Instance("ml.trn1.2xlarge", 1.54, 2, 95.0, 96.0, 12.5, 8),
        Instance("ml.c7i.8xlarge", 1.714, 1, 0.0, 0.0, 12.5, 32),
        Instance("ml.c5.18xlarge", 3.672, 1, 0.0, 0.0, 25.0, 72),
        Instance("ml.c5.9xlarge", 1.836, 1, 0.0, 0.0, 12.0, 36),
    )
}


def find(name: str) -> Instance | None:
    """Return a machine by its name, with or without the leading `ml.`; None if the table has no such row."""
    return TABLE.get(name) or TABLE.get(f"ml.{name}")

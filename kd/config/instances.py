"""Prices of rented machines, USD per hour.

On-demand list prices of SageMaker training in us-east-1 on 2026-09-27, from the AWS Price List API (`AmazonSageMaker`
offer file) as a public notebook toolkit recorded them. `price.per_hour` of a configuration overrides them.
"""

PRICED_ON = "2026-09-27"  # date of the prices

TABLE = {
    "ml.p5.48xlarge": 63.296,
    "ml.p5.4xlarge": 7.912,
    "ml.p4de.24xlarge": 31.5641,
    "ml.p4d.24xlarge": 25.2513,
    "ml.g6e.48xlarge": 37.66,
    "ml.g6e.xlarge": 2.61,
    "ml.g6.48xlarge": 16.688,
    "ml.g6.xlarge": 1.127,
    "ml.g5.48xlarge": 20.36,
    "ml.g5.12xlarge": 7.09,
    "ml.g5.xlarge": 1.41,
    "ml.g4dn.xlarge": 0.7364,
    "ml.trn1.32xlarge": 24.73,
    "ml.trn1.2xlarge": 1.54,
    "ml.c7i.8xlarge": 1.714,
    "ml.c5.18xlarge": 3.672,
    "ml.c5.9xlarge": 1.836,
}


def price_per_hour(name: str) -> float:
    """Return the list price of a machine, named with or without `ml.`; 0: it is not in the table."""
    return TABLE.get(name) or TABLE.get(f"ml.{name}", 0.0)

"""Define CloudWatch's metrics, read from what `kd-train` prints without a terminal."""

import re

NUMBER = r"(-?[0-9.]+(?:e[-+]?[0-9]+)?)"
METRICS = {
    "train:loss": rf"\| loss {NUMBER}",
    "train:lr": rf" lr {NUMBER} ",
    "train:images_per_second": rf" {NUMBER} images/s",
    "train:step_ms": rf" {NUMBER} ms per step,",
    "train:data_wait_percent": rf"data wait {NUMBER} %",
    "val:accuracy_percent": rf"\| val accuracy {NUMBER} %",
    "val:map_percent": rf"\| val mAP {NUMBER} %",
    "val:nearest_neighbours_percent": rf"\| val nearest neighbours {NUMBER} %",
    "val:teacher_accuracy_percent": rf"\(teacher {NUMBER} %",
    "val:agreement_percent": rf"agreement {NUMBER} %",
    "val:agreement_cosine": r"agreement (-?[01]\.[0-9]{4})",
}
"""Regular expressions of the end of a line about a step."""


def metric_definitions(run: str) -> list[dict[str, str]]:
    """Return MetricDefinitions for the lines of a run itself."""
    # its teacher's fit and its baseline print other lines
    begin = rf"{re.escape(run)} \| step [0-9]+ .*"
    return [
        {"Name": name, "Regex": f"{begin}{regex}"} for name, regex in METRICS.items()
    ]

"""The page for Prometheus."""

import re

from kd.deploy.serve.metrics import BOUNDS, Metrics


def test_the_text_for_prometheus():
    metrics = Metrics('a "name"\nof two lines', "v1")
    for seconds in (0.0005, 0.003, 0.003, 99.0):
        metrics.request("invocations", 200, seconds)
    metrics.request("invocations", 415, 0.2)
    text = metrics.text(True, 3, 4096)
    sample = re.compile(r'[a-z_]+(\{[a-z]+="(\\.|[^"\\])*"(,[a-z]+="(\\.|[^"\\])*")*\})? [0-9.e+-]+')
    for line in text.splitlines():
        assert line.startswith(("# HELP ", "# TYPE ")) or sample.fullmatch(line), line
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['kd_requests_total{route="invocations",status="200"}'] == "4"
    assert values["kd_in_flight"] == "3"
    buckets = [int(v) for k, v in values.items() if k.startswith("kd_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert len(buckets) == len(BOUNDS) + 1
    assert buckets[-1] == int(values['kd_seconds_count{stage="invocations total"}']) == 5
    assert int(values["process_resident_memory_bytes"]) > 1_000_000

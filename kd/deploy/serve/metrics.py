"""Export the endpoint's metrics to Prometheus, in its text format (0.0.4)."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kd.deploy.serve.logs import LogQueue
from kd.deploy.shift import CONFIDENCE, ShiftWatch

# upper ends of a histogram's buckets, seconds
BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# most labels with their own series: 10,000 classes would make 600 kB per scrape
MOST_LABELS = 100
# of images that are passed on, as the export expects
SHARES = ("validation", "validation low", "validation high")


class ServiceState(Protocol):
    """The values of a service that the gauges read."""

    @property
    def ready(self) -> bool: ...
    @property
    def in_progress(self) -> int: ...
    @property
    def buffered(self) -> int: ...


class Metrics:
    """Counters, gauges and histograms of the endpoint. Thread-safe.

    `expected`: the share of images passed on to a second model, see
    `Description.passed_on`; None: there is one model.
    """

    def __init__(
        self,
        model: str,
        version: str,
        state: ServiceState,
        expected: Sequence[float] | None = None,
    ) -> None:
        disable_created_metrics()
        registry = CollectorRegistry()
        self._registry = registry
        Info("kd_model", "The model that is served.", registry=registry).info(
            {"name": model, "version": version}
        )
        gauges = {
            "kd_ready": (
                "1 while a load balancer should send requests.",
                lambda: state.ready,
            ),
            "kd_in_flight": (
                "Requests in progress or waiting.",
                lambda: state.in_progress,
            ),
            "kd_buffered_bytes": ("Bytes of bodies in memory.", lambda: state.buffered),
        }
        for name, (meaning, read) in gauges.items():
            Gauge(name, meaning, registry=registry).set_function(read)
        self._images = Counter("kd_images", "Images classified.", registry=registry)
        self._requests = Counter(
            "kd_requests",
            "Requests by route and status.",
            ["route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "kd_seconds",
            "Where the time of a request goes.",
            ["stage"],
            buckets=BOUNDS,
            registry=registry,
        )
        self._passed_on = Counter(
            "kd_passed_on", "Images of the second model.", registry=None
        )
        if expected is not None:
            registry.register(self._passed_on)
            self._share_passed_on(expected)
        ProcessCollector(registry=registry)

    def _share_passed_on(self, expected: Sequence[float]) -> None:
        meaning = (
            "Share of images passed on; low and high: ends of validation's 95 %"
            " interval."
        )
        share = Gauge("kd_passed_on_share", meaning, ["of"], registry=self._registry)
        for name, value in zip(SHARES, expected, strict=False):
            share.labels(name).set(value)
        share.labels("endpoint").set_function(
            lambda: _count(self._passed_on) / max(1.0, _count(self._images))
        )

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a finished request; `route` is a fixed name, never a client's text."""
        self._requests.labels(route, status).inc()
        self.stage(f"{route} total", seconds)

    def stage(self, name: str, seconds: float) -> None:
        self._seconds.labels(name).observe(seconds)

    def images(self, count: int, passed_on: int = 0) -> None:
        """Count images, and those among them that the second model predicted."""
        self._images.inc(count)
        self._passed_on.inc(passed_on)

    def self_check(self, passed: bool) -> None:
        meaning = "1 if pixels and outputs of the self-check are those at the export."
        Gauge("kd_self_check", meaning, registry=self._registry).set(passed)

    def watch_log(self, log: LogQueue) -> None:
        """Count the dropped lines of a log too."""
        self._registry.register(_DroppedLines(log))

    def watch_shift(self, watch: ShiftWatch) -> None:
        """Count predictions too, and their differences from validation."""
        self._registry.register(_Predictions(watch))

    def text(self) -> bytes:
        return generate_latest(self._registry)


def _count(counter: Counter) -> float:
    (metric,) = counter.collect()
    return metric.samples[0].value


class _DroppedLines(Collector):
    def __init__(self, log: LogQueue) -> None:
        self._log = log

    def collect(self) -> Iterator[Metric]:
        meaning = "Log lines dropped because stderr was not read."
        yield CounterMetricFamily(
            "kd_log_lines_dropped", meaning, value=self._log.dropped
        )


class _Predictions(Collector):
    """Counts of predictions, and their differences from validation."""

    def __init__(self, watch: ShiftWatch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        watch = self._watch
        if CONFIDENCE in watch.reference.bounds:
            yield from self._labels()
            yield self._confidence()
        yield from self._expected_accuracy()
        meaning = (
            "-log10 of the p-value that the last images are like those of validation; 6"
            " or more is an alarm."
        )
        shift = GaugeMetricFamily("kd_shift", meaning, labels=["of"])
        shift.add_metric(["appearance"], watch.result.appearance)
        shift.add_metric(["labels"], watch.result.labels)
        yield shift
        alarms = CounterMetricFamily(
            "kd_shift_alarms", "Windows that raised an alarm.", labels=["of"]
        )
        for name, count in watch.alarms.items():
            alarms.add_metric([name], count)
        yield alarms

    def _labels(self) -> Iterator[Metric]:
        counts = self._watch.label_counts
        frequent = counts.most_common(MOST_LABELS)
        meaning = f"Predicted labels, the {MOST_LABELS} most frequent."
        labels = CounterMetricFamily("kd_labels", meaning, labels=["label"])
        for label, count in sorted(frequent):
            labels.add_metric([label], count)
        yield labels
        # A gauge: it falls when a label joins the most frequent ones. A class may be
        # named "other".
        infrequent = counts.total() - sum(count for _, count in frequent)
        meaning = "Predictions of any other label."
        yield GaugeMetricFamily("kd_labels_other", meaning, value=infrequent)

    def _confidence(self) -> Metric:
        reference = self._watch.reference
        tally = self._watch.all
        label = "the most probable label"
        if reference.replaced:
            label = "the first model's label"
        ends = [*(f"{bound:g}" for bound in reference.bounds[CONFIDENCE]), "+Inf"]
        counts = tally.bins[list(reference.bounds).index(CONFIDENCE)].sum(0).cumsum()
        buckets = [(end, float(count)) for end, count in zip(ends, counts, strict=True)]
        meaning = f"Probability of {label} of an image."
        histogram = HistogramMetricFamily("kd_confidence", meaning)
        histogram.add_metric([], buckets, sum_value=tally.confidence)
        return histogram

    def _expected_accuracy(self) -> Iterator[Metric]:
        reference = self._watch.reference
        result = self._watch.result
        if reference.replaced:
            meaning = "Unknown with a second model: validation had the first."
            yield GaugeMetricFamily("kd_expected_accuracy", meaning, labels=[])
        elif reference.calibrated and reference.right >= 0 and result.images:
            meaning = (
                "Accuracy on validation images, shifted by the change of the mean"
                " confidence in the last window."
            )
            value = reference.expected(result.confidence)
            yield GaugeMetricFamily("kd_expected_accuracy", meaning, value=value)

"""Check AWS's documented limits that its service model does not have.

From botocore's texts and the named pages.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kd.cluster.sagemaker_profiler import INTERVALS_MS
from kd.core.errors import ConfigError

# CreateTransformJob, MaxPayloadInMB: limit of its product with MaxConcurrentTransforms
PAYLOADS_MB = 100
ACCELERATED = ("ml.inf", "ml.trn", "ml.g", "ml.p")  # kd-serve's image runs on the CPU


def limit_errors(operation: str, request: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield errors in requests that the service would refuse, or run in vain."""
    check = {
        "CreateTrainingJob": _training,
        "CreateEndpointConfig": _endpoint,
        "CreateTransformJob": _transform,
    }
    if operation in check:
        yield from check[operation](request)


def _training(request: Mapping[str, Any]) -> Iterator[ConfigError]:
    stop = request["StoppingCondition"]
    run = stop["MaxRuntimeInSeconds"]
    wait = stop.get("MaxWaitTimeInSeconds")
    spot = request.get("EnableManagedSpotTraining", False)
    config_path = "StoppingCondition.MaxWaitTimeInSeconds"
    if spot and (wait is None or wait < run):  # API_StoppingCondition
        wrong = f"is {wait}, below the run time"
        yield ConfigError(config_path, wrong, f"At least {run}", "Raise it in --extra")
    if wait is not None and not spot:
        wrong = "is given, but the job is no spot job"
        yield ConfigError(
            config_path, wrong, "Only with --spot", "Add --spot, or drop it"
        )
    interval = request.get("ProfilerConfig", {}).get(
        "ProfilingIntervalInMilliseconds", INTERVALS_MS[0]
    )
    if interval not in INTERVALS_MS:  # API_ProfilerConfig
        config_path = "ProfilerConfig.ProfilingIntervalInMilliseconds"
        allowed = f"One of {', '.join(map(str, INTERVALS_MS))}"
        yield ConfigError(
            config_path, f"is {interval}", allowed, "Correct it in --extra"
        )
    resources = request["ResourceConfig"]
    if resources.get("KeepAlivePeriodInSeconds"):  # train-warm-pools, "Considerations"
        config_path = "ResourceConfig.KeepAlivePeriodInSeconds"
        allowed = "A warm pool has on-demand instances of one type"
        foreign = {
            "a spot job": spot,
            "instance groups": "InstanceGroups" in resources,
        }
        for name, present in foreign.items():
            if present:
                wrong = f"does not go with {name}"
                yield ConfigError(config_path, wrong, allowed, "Drop one of them")


def _endpoint(request: Mapping[str, Any]) -> Iterator[ConfigError]:
    for variant in request["ProductionVariants"]:
        yield from _instance(variant["InstanceType"])


def _transform(request: Mapping[str, Any]) -> Iterator[ConfigError]:
    yield from _instance(request["TransformResources"]["InstanceType"])
    payload_mb = request["MaxPayloadInMB"]
    at_once = request["MaxConcurrentTransforms"]
    limit = PAYLOADS_MB // payload_mb
    if at_once > limit:
        allowed = (
            f"At most {limit}: images of {payload_mb} MB, {PAYLOADS_MB} MB at once"
        )
        remedy = "Use more instances: --count"
        yield ConfigError("--at-once", f"is {at_once}", allowed, remedy)
    source = request["TransformInput"]["DataSource"]["S3DataSource"]
    images = source["S3Uri"].rstrip("/")
    output = request["TransformOutput"]["S3OutputPath"].rstrip("/")
    if f"{output}/".startswith(f"{images}/"):
        wrong = (
            f"is '{output}', below the images: a second job would read the first one's"
            " output"
        )
        yield ConfigError(
            "--to", wrong, "A prefix outside of IMAGES", "Choose another one"
        )


def _instance(kind: str) -> Iterator[ConfigError]:
    if kind.startswith(ACCELERATED):
        wrong = f"is {kind}, whose accelerator kd-serve does not use"
        yield ConfigError(
            "--instance", wrong, "A CPU instance, such as ml.c7i.xlarge", "Choose one"
        )

"""AWS's documented limits that its service model does not check, from botocore's texts
and the named pages.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kd.cluster.sagemaker_profiler import INTERVALS_MS
from kd.core.errors import ConfigError

# CreateTransformJob, MaxPayloadInMB: limit of its product with MaxConcurrentTransforms
PAYLOADS_MB = 100
ACCELERATED = ("ml.inf", "ml.trn", "ml.g", "ml.p")  # kd-serve's image runs on the CPU


def refusals(operation: str, request: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield errors in requests that fit the model but that the service would refuse, or
    run in vain.
    """
    check = {
        "CreateTrainingJob": _training,
        "CreateEndpointConfig": _endpoint,
        "CreateTransformJob": _transform,
    }
    if operation in check:
        yield from check[operation](request)


def _training(request: Mapping[str, Any]) -> Iterator[ConfigError]:
    resources, stop = request["ResourceConfig"], request["StoppingCondition"]
    run, wait = stop["MaxRuntimeInSeconds"], stop.get("MaxWaitTimeInSeconds")
    spot = request.get("EnableManagedSpotTraining", False)
    config_path = "StoppingCondition.MaxWaitTimeInSeconds"
    if spot and (wait is None or wait < run):  # API_StoppingCondition
        yield ConfigError(
            config_path,
            f"is {wait}, below the run time",
            f"At least {run}",
            "Raise it in --extra",
        )
    if wait is not None and not spot:
        yield ConfigError(
            config_path,
            "is given, but the job is no spot job",
            "Only with --spot",
            "Add --spot, or drop it",
        )
    interval = request.get("ProfilerConfig", {}).get(
        "ProfilingIntervalInMilliseconds", INTERVALS_MS[0]
    )
    if interval not in INTERVALS_MS:  # API_ProfilerConfig
        config_path, allowed = (
            "ProfilerConfig.ProfilingIntervalInMilliseconds",
            f"One of {', '.join(map(str, INTERVALS_MS))}",
        )
        yield ConfigError(
            config_path, f"is {interval}", allowed, "Correct it in --extra"
        )
    if resources.get("KeepAlivePeriodInSeconds"):  # train-warm-pools, "Considerations"
        for wrong, found in (
            ("a spot job", spot),
            ("instance groups", "InstanceGroups" in resources),
        ):
            if found:
                config_path = "ResourceConfig.KeepAlivePeriodInSeconds"
                allowed = "A warm pool has on-demand instances of one type"
                yield ConfigError(
                    config_path,
                    f"does not go with {wrong}",
                    allowed,
                    "Drop one of them",
                )


def _endpoint(request: Mapping[str, Any]) -> Iterator[ConfigError]:
    for variant in request["ProductionVariants"]:
        yield from _instance(variant["InstanceType"])


def _transform(request: Mapping[str, Any]) -> Iterator[ConfigError]:
    yield from _instance(request["TransformResources"]["InstanceType"])
    most = PAYLOADS_MB // request["MaxPayloadInMB"]
    if request["MaxConcurrentTransforms"] > most:
        wrong, remedy = (
            f"is {request['MaxConcurrentTransforms']}",
            "Use more instances: --count",
        )
        allowed = (
            f"At most {most}: images of {request['MaxPayloadInMB']} MB, {PAYLOADS_MB}"
            " MB at once"
        )
        yield ConfigError("--at-once", wrong, allowed, remedy)
    images = request["TransformInput"]["DataSource"]["S3DataSource"]["S3Uri"].rstrip(
        "/"
    )
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

"""Requests to SageMaker as plain data: a training job, an endpoint, a batch transform.
`aws` sends them.

`validate` checks a request against botocore's model of the service.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kd.cluster.aws_limits import refusals
from kd.cluster.cloudwatch import definitions
from kd.cluster.hosts import PIECE
from kd.cluster.sagemaker_profiler import sections
from kd.core.errors import (
    ConfigError,
    ConfigErrors,
    KdError,
    did_you_mean,
    import_optional,
)
from kd.core.facts import BackendFacts
from kd.core.options import option, parse_positive, whole_number
from kd.parts import registry

if TYPE_CHECKING:
    from kd.core.facts import FileKey

CHECKPOINTS = (  # SageMaker copies it to S3 during a job, and back at a restart
    "/opt/ml/checkpoints"
)
INPUT = "/opt/ml/input/data"
TRAINERS, LOADERS = "dnn", "data"  # the instance groups
SPOT_WAIT_SECONDS = (
    24 * 3600
)  # seconds that a job may wait for spot capacity, beside its run time
MOST_KEYS, MOST_TEXT = (
    100,
    2500,
)  # CreateTrainingJob: hyperparameters, and characters of one
PATTERN = re.compile(r"[{*?\[]")
COUNT = whole_number(1, 999_999)
IMAGE_RUNTIMES = ("onnxruntime", "openvino")  # installed by `Dockerfile`


def _data_group(text: str) -> tuple[str, int]:
    kind, colon, count = text.partition(":")
    if not kind or not colon:
        raise ValueError(f"'{text}' is not TYPE:N, such as ml.c5.18xlarge:2")
    return kind, COUNT(count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training job."""

    name: str  # unique for each job
    keys: Mapping[
        str, str
    ]  # the configuration as {"section.key": value}; see `kd.config.flat`
    files: Sequence[FileKey] = ()
    """Keys that name files. Their values must be on S3: a job does not see this
    machine's files.
    """
    image: str
    role: str
    output: str  # `s3://bucket/prefix` for results and checkpoints
    instance: str = option("", "TYPE")
    """Instance type of the trainers."""
    count: int = option(1, "N", COUNT)
    """Number of trainers."""
    data_group: tuple[str, int] | None = option(None, "TYPE:N", _data_group)
    """Instance type and number of hosts that only decode images."""
    backend: str = option("", "KIND")
    """`backend.kind`: cuda, smddp, xla or neuron."""
    spot: bool = option(False)
    """Spot instances; the job resumes after an interruption."""
    hours: float = option(24.0, "H", float)
    """Longest run time."""
    volume: int = option(100, "GIB", COUNT)
    """Disk of each instance."""
    view_ms: float = option(0.0, "MS", parse_positive)
    """Milliseconds of a core per view, which `kd-train CONFIG --check` measures: plan
    the cores that the job needs.
    """
    images_per_second: float = option(0.0, "N", parse_positive)
    """Images per second of the student on one accelerator, for this plan."""
    profiler: bool = option(False)
    """Have SageMaker profile the job: system metrics once per second and a report of
    its rules, in OUTPUT/profiler.
    """
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Merged into the request: VpcConfig, Tags, ... Sections are merged, lists are
    appended.
    """


def training_request(job: Job) -> dict[str, Any]:
    """Return the arguments of CreateTrainingJob. Checkpoints are kept by `run.name`, so
    that the next job resumes.
    """
    channels, keys, errors = _channels(job)
    keys |= {"run.folder": CHECKPOINTS, "teacher.fit.folder": f"{CHECKPOINTS}/teachers"}
    keys["backend.kind"] = _backend(job, errors)
    if job.data_group:
        keys["data.loader"] = "ray"
    elif keys.get("data.loader") == "ray":
        remedy = "Add --data-group TYPE:N, or set data.loader=local"
        errors.append(
            ConfigError(
                "data.loader", "is ray, but the job has no data group", "", remedy
            )
        )
    if errors:
        raise ConfigErrors(errors)
    run_seconds = int(job.hours * 3600)
    stop = {"MaxRuntimeInSeconds": run_seconds}
    if job.spot:
        stop["MaxWaitTimeInSeconds"] = run_seconds + SPOT_WAIT_SECONDS
    request = {
        "TrainingJobName": job.name,
        "AlgorithmSpecification": {
            "TrainingImage": job.image,
            "TrainingInputMode": "FastFile",
            "MetricDefinitions": definitions(job.keys["run.name"]),
        },
        "RoleArn": job.role,
        "HyperParameters": _hyperparameters(keys),
        "OutputDataConfig": {"S3OutputPath": f"{job.output}/output"},
        "ResourceConfig": {**_instances(job), "VolumeSizeInGB": job.volume},
        "StoppingCondition": stop,
        "CheckpointConfig": {
            "S3Uri": f"{job.output}/checkpoints/{job.keys['run.name']}",
            "LocalPath": CHECKPOINTS,
        },
        "EnableManagedSpotTraining": job.spot,
    }
    if job.data_group:
        request["Environment"] = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
    if channels:
        request["InputDataConfig"] = channels
    if job.profiler:
        request |= sections(job.image, job.output)
    return _joined(request, job.extra)


def _hyperparameters(keys: dict[str, str]) -> dict[str, str]:
    """Return a configuration by its keys or, where the service would refuse those, as
    JSON in numbered pieces.
    """
    if len(keys) <= MOST_KEYS and max(map(len, keys.values())) <= MOST_TEXT:
        return dict(sorted(keys.items()))
    text = json.dumps(keys)
    cuts = range(0, len(text), MOST_TEXT)
    return {
        f"{PIECE}{number:03}": text[cut : cut + MOST_TEXT]
        for number, cut in enumerate(cuts)
    }


def _joined(request: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a value into another one, section by section; lists are appended."""
    joined = {**request, **extra}
    for key in request.keys() & extra.keys():
        if isinstance(request[key], dict) and isinstance(extra[key], dict):
            joined[key] = _joined(request[key], extra[key])
        elif isinstance(request[key], list) and isinstance(extra[key], list):
            joined[key] = request[key] + extra[key]
    return joined


def _instances(job: Job) -> dict[str, Any]:
    if job.data_group is None:
        return {"InstanceType": job.instance, "InstanceCount": job.count}
    kind, count = job.data_group
    groups = [(TRAINERS, job.instance, job.count), (LOADERS, kind, count)]
    keys = ("InstanceGroupName", "InstanceType", "InstanceCount")
    return {"InstanceGroups": [dict(zip(keys, group, strict=True)) for group in groups]}


def _backend(job: Job, errors: list[KdError]) -> str:
    """Return `backend.kind`; `auto` is resolved for the instance type here, so that
    this machine can check it.
    """
    kind = job.backend or job.keys.get("backend.kind", "auto")
    if kind == "auto":
        known = (
            (name, begin)
            for name in registry.names("backends")
            for begin in _facts(name).chosen_on
        )
        fit = [
            (len(begin), name)
            for name, begin in known
            if job.instance.startswith(begin)
        ]
        return max(fit, default=(0, "cpu"))[1]
    wanted = _facts(kind).instances
    if job.keys.get("backend.fallback", "none") != "none":
        wanted = ("",)
    if not job.instance.startswith(wanted):
        allowed = f"'{kind}' runs on {', '.join(f'{name}*' for name in wanted)}"
        wrong = f"is '{kind}', which does not run on {job.instance}"
        errors.append(
            ConfigError(
                "backend.kind", wrong, allowed, "Choose another --instance or --backend"
            )
        )
    return kind


def _facts(kind: str) -> BackendFacts:
    options = registry.options_type("backends", kind, "backend.kind")()
    return registry.facts("backends", kind, options, "backend.kind")


def _channels(job: Job) -> tuple[list[dict[str, Any]], dict[str, str], list[KdError]]:
    """Turn `s3://...` values into channels; return channels, the keys with paths in the
    container, and errors.
    """
    channels, keys, errors = [], dict(job.keys), list[KdError]()
    files = {one.key: one for one in job.files}
    for key, value in {**{one.key: one.value for one in job.files}, **job.keys}.items():
        if not value.startswith("s3://") or key.startswith("run."):
            if (
                key in files
                and "${" not in value
                and (wrong := _not_brought(value, files[key]))
            ):
                errors.append(
                    ConfigError(
                        key,
                        wrong,
                        "s3://BUCKET/PREFIX",
                        f"Upload it and set {key}=s3://...",
                    )
                )
            continue
        name = re.sub(r"[^A-Za-z0-9-]", "-", key)
        folder, _, last = value.rpartition("/")
        if PATTERN.search(folder):
            errors.append(
                ConfigError(
                    key,
                    f"'{value}' has a pattern in its folder",
                    "Patterns in the file name only",
                )
            )
        keys[key] = f"{INPUT}/{name}"
        if PATTERN.search(
            last
        ):  # FastFile mounts the folder; the container reads the pattern
            channels.append(_channel(name, f"{folder}/"))
            keys[key] += f"/{last}"
        elif "." in last:
            channels.append(_channel(name, value))
            keys[key] += f"/{last}"
        else:
            channels.append(_channel(name, value.rstrip("/") + "/"))
        if job.data_group and not key.startswith(
            "data."
        ):  # data hosts decode images and need no weights
            channels[-1]["DataSource"]["S3DataSource"]["InstanceGroupNames"] = [
                TRAINERS
            ]
    return channels, keys, errors


def _not_brought(value: str, file: FileKey) -> str:
    """Return why a job would not find a file; "" if it would, or if the value is a name
    or a URL.
    """
    own = value.startswith(("/", "~"))
    if file.within and not own:
        outside = posixpath.normpath(value).split("/")[0] == ".."
        return (
            f"'{value}' is outside of {file.within}, and no channel brings it"
            if outside
            else ""
        )
    looked_up = (
        "://" in value
        or value.startswith("pip:")
        or (file.or_name and not own and value[0] != "." and not os.path.exists(value))
    )
    if looked_up and not value.startswith("local-dir:"):
        return ""
    return f"'{value}' is a path of this machine; a training job does not see it"


def _channel(name: str, uri: str) -> dict[str, Any]:
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": uri,
        "S3DataDistributionType": "FullyReplicated",
    }
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosting:
    """An export on SageMaker: an endpoint or a batch transform."""

    name: str
    image: str  # the image with kd-serve (`Dockerfile`)
    role: str
    model: str  # `s3://.../model.tar.gz`
    instance: str = option("", "TYPE")
    """Instance type."""
    count: int = option(1, "N", COUNT)
    """Number of instances."""


def hosting_requests(hosting: Hosting) -> dict[str, dict[str, Any]]:
    """Return the arguments of CreateModel, CreateEndpointConfig and CreateEndpoint, in
    the order of sending.
    """
    name = hosting.name
    variant = {
        "VariantName": "all",
        "ModelName": name,
        "InstanceType": hosting.instance,
        "InitialInstanceCount": hosting.count,
    }
    return {
        "CreateModel": model_request(hosting),
        "CreateEndpointConfig": {
            "EndpointConfigName": name,
            "ProductionVariants": [variant],
        },
        "CreateEndpoint": {"EndpointName": name, "EndpointConfigName": name},
    }


def model_request(hosting: Hosting) -> dict[str, Any]:
    """Return the arguments of CreateModel."""
    return {
        "ModelName": hosting.name,
        "ExecutionRoleArn": hosting.role,
        "PrimaryContainer": {"Image": hosting.image, "ModelDataUrl": hosting.model},
    }


def transform_requests(
    hosting: Hosting, images: str, output: str, at_once: int
) -> dict[str, dict[str, Any]]:
    """Return the arguments of CreateModel and CreateTransformJob: an image is a request
    and a file `NAME.out`.
    """
    source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": images}}
    job = {
        "TransformJobName": hosting.name,
        "ModelName": hosting.name,
        "MaxConcurrentTransforms": at_once,
        "MaxPayloadInMB": 6,
        "BatchStrategy": "SingleRecord",
        "TransformInput": {"DataSource": source, "ContentType": "application/x-image"},
        "TransformOutput": {"S3OutputPath": output, "Accept": "application/json"},
        "TransformResources": {
            "InstanceType": hosting.instance,
            "InstanceCount": hosting.count,
        },
    }
    return {"CreateModel": model_request(hosting), "CreateTransformJob": job}


def validate(operation: str, request: Mapping[str, Any]) -> None:
    """Check a request by botocore's validator, by `rules`, and for lengths, patterns
    and enumerations.
    """
    session, validation = (
        import_optional(
            f"botocore.{name}",
            "kd-launch",
            "boto3 is not installed",
            "pip install 'PATH/kd[sagemaker]'",
        )
        for name in ("session", "validate")
    )
    shape = (
        session.get_session()
        .get_service_model("sagemaker")
        .operation_model(operation)
        .input_shape
    )
    report = validation.ParamValidator().validate(request, shape)
    if report.has_errors():
        lines = report.generate_report().splitlines()
        raise ConfigErrors(
            [
                ConfigError(operation, line, "", "See the options of kd-launch")
                for line in lines
            ]
        )
    errors = [*_violations(shape, request, operation), *refusals(operation, request)]
    if errors:
        raise ConfigErrors(errors)


def _violations(shape: Any, value: Any, path: str) -> Iterator[KdError]:
    """Yield errors that botocore does not check but the service does."""
    for inner_shape, inner_value, inner_path in _children(shape, value, path):
        yield from _violations(inner_shape, inner_value, inner_path)
    kind, limits = shape.type_name, shape.metadata
    if kind == "string" and limits.get("enum") and value not in limits["enum"]:
        near = did_you_mean(value, limits["enum"]) or "Correct it"
        yield ConfigError(
            path, f"is '{value}'", f"One of {len(limits['enum'])} names", near
        )
    if kind == "string" and not _matches(limits.get("pattern", ""), value):
        yield ConfigError(path, f"is '{value[:80]}'", f"Text like {limits['pattern']}")
    size = len(value) if kind in ("string", "list", "map") else value
    if "max" in limits and kind != "structure" and size > limits["max"]:
        yield ConfigError(path, f"has {size}", f"At most {limits['max']}", "Shorten it")


def _children(shape: Any, value: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    if shape.type_name == "structure":
        yield from (
            (shape.members[key], inner, f"{path}.{key}") for key, inner in value.items()
        )
    elif shape.type_name == "list":
        yield from (
            (shape.member, inner, f"{path}[{i}]") for i, inner in enumerate(value)
        )
    elif shape.type_name == "map":
        for key, inner in value.items():
            yield shape.key, key, f"{path}.{key}"
            yield shape.value, inner, f"{path}.{key}"


def _matches(pattern: str, value: str) -> bool:
    try:
        return not pattern or re.fullmatch(f"(?:{pattern})", value) is not None
    except re.error:  # patterns are Java's; some have classes such as \\p{L}
        return True

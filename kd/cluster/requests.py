"""Write requests to SageMaker: a training job, an endpoint, a batch transform.

They are plain data, which `aws` sends. `validate` checks a request against botocore's
model of the service.
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

from kd.cluster.aws_limits import limit_errors
from kd.cluster.cloudwatch import metric_definitions
from kd.cluster.hosts import PIECE
from kd.cluster.sagemaker_profiler import profiler_sections
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

# SageMaker copies it to S3 during a job, and back at a restart
CHECKPOINTS = "/opt/ml/checkpoints"
INPUT = "/opt/ml/input/data"
TRAINERS = "dnn"  # an instance group
LOADERS = "data"  # an instance group
# seconds that a job may wait for spot capacity, beside its run time
SPOT_WAIT_SECONDS = 24 * 3600
MOST_KEYS = 100  # hyperparameters of CreateTrainingJob
MOST_TEXT = 2500  # characters of a hyperparameter of CreateTrainingJob
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
    # the configuration as {"section.key": value}; see `kd.config.flat`
    keys: Mapping[str, str]
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
    """Return the arguments of CreateTrainingJob."""
    # checkpoints are kept by `run.name`, so that the next job resumes
    channels, keys, errors = _channels(job)
    keys |= {"run.folder": CHECKPOINTS, "teacher.fit.folder": f"{CHECKPOINTS}/teachers"}
    keys["backend.kind"] = _backend(job, errors)
    if job.data_group:
        keys["data.loader"] = "ray"
    elif keys.get("data.loader") == "ray":
        remedy = "Add --data-group TYPE:N, or set data.loader=local"
        wrong = "is ray, but the job has no data group"
        errors.append(ConfigError("data.loader", wrong, "", remedy))
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
            "MetricDefinitions": metric_definitions(job.keys["run.name"]),
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
        request |= profiler_sections(job.image, job.output)
    return _merged(request, job.extra)


def _hyperparameters(keys: dict[str, str]) -> dict[str, str]:
    """Return a configuration by its keys, or as JSON in pieces if that is too long."""
    if len(keys) <= MOST_KEYS and max(map(len, keys.values())) <= MOST_TEXT:
        return dict(sorted(keys.items()))
    text = json.dumps(keys)
    cuts = range(0, len(text), MOST_TEXT)
    return {
        f"{PIECE}{number:03}": text[cut : cut + MOST_TEXT]
        for number, cut in enumerate(cuts)
    }


def _merged(request: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with further values; sections are merged, lists appended."""
    merged = {**request, **extra}
    for key in request.keys() & extra.keys():
        if isinstance(request[key], dict) and isinstance(extra[key], dict):
            merged[key] = _merged(request[key], extra[key])
        elif isinstance(request[key], list) and isinstance(extra[key], list):
            merged[key] = request[key] + extra[key]
    return merged


def _instances(job: Job) -> dict[str, Any]:
    if job.data_group is None:
        return {"InstanceType": job.instance, "InstanceCount": job.count}
    kind, count = job.data_group
    groups = [(TRAINERS, job.instance, job.count), (LOADERS, kind, count)]
    keys = ("InstanceGroupName", "InstanceType", "InstanceCount")
    return {"InstanceGroups": [dict(zip(keys, group, strict=True)) for group in groups]}


def _backend(job: Job, errors: list[KdError]) -> str:
    """Return `backend.kind`; `auto` becomes the one for the instance type."""
    kind = job.backend or job.keys.get("backend.kind", "auto")
    if kind == "auto":
        fitting = [
            (len(begin), name)
            for name in registry.names("backends")
            for begin in _facts(name).chosen_on
            if job.instance.startswith(begin)
        ]
        return max(fitting, default=(0, "cpu"))[1]
    instances = _facts(kind).instances
    if job.keys.get("backend.fallback", "none") != "none":
        instances = ("",)
    if not job.instance.startswith(instances):
        allowed = f"'{kind}' runs on {', '.join(f'{name}*' for name in instances)}"
        wrong = f"is '{kind}', which does not run on {job.instance}"
        remedy = "Choose another --instance or --backend"
        errors.append(ConfigError("backend.kind", wrong, allowed, remedy))
    return kind


def _facts(kind: str) -> BackendFacts:
    options = registry.options_type("backends", kind, "backend.kind")()
    return registry.facts("backends", kind, options, "backend.kind")


def _channels(job: Job) -> tuple[list[dict[str, Any]], dict[str, str], list[KdError]]:
    """Turn `s3://...` values into channels; return them, the new keys, and errors."""
    channels = []
    keys = dict(job.keys)
    errors: list[KdError] = []
    files = {file.key: file for file in job.files}
    values = {**{key: file.value for key, file in files.items()}, **job.keys}
    for key, value in values.items():
        if not value.startswith("s3://") or key.startswith("run."):
            if key in files and "${" not in value:
                wrong = _missing_text(value, files[key])
                if wrong:
                    remedy = f"Upload it and set {key}=s3://..."
                    errors.append(ConfigError(key, wrong, "s3://BUCKET/PREFIX", remedy))
            continue
        name = re.sub(r"[^A-Za-z0-9-]", "-", key)
        folder, _, last = value.rpartition("/")
        if PATTERN.search(folder):
            wrong = f"'{value}' has a pattern in its folder"
            errors.append(ConfigError(key, wrong, "Patterns in the file name only"))
        keys[key] = f"{INPUT}/{name}"
        # FastFile mounts the folder; the container reads the pattern
        if PATTERN.search(last):
            source = _s3_source(f"{folder}/")
            keys[key] += f"/{last}"
        elif "." in last:
            source = _s3_source(value)
            keys[key] += f"/{last}"
        else:
            source = _s3_source(value.rstrip("/") + "/")
        # data hosts decode images and need no weights
        if job.data_group and not key.startswith("data."):
            source["InstanceGroupNames"] = [TRAINERS]
        channels.append({"ChannelName": name, "DataSource": {"S3DataSource": source}})
    return channels, keys, errors


def _missing_text(value: str, file: FileKey) -> str:
    """Return why a job would not find a file, or "" if it would or need not."""
    absolute = value.startswith(("/", "~"))
    if file.within and not absolute:
        if posixpath.normpath(value).split("/")[0] == "..":
            return f"'{value}' is outside of {file.within}, and no channel brings it"
        return ""
    is_path = absolute or value.startswith(".") or os.path.exists(value)
    named = file.or_name and not is_path
    looked_up = "://" in value or value.startswith("pip:") or named
    if looked_up and not value.startswith("local-dir:"):
        return ""
    return f"'{value}' is a path of this machine; a training job does not see it"


def _s3_source(uri: str) -> dict[str, Any]:
    return {
        "S3DataType": "S3Prefix",
        "S3Uri": uri,
        "S3DataDistributionType": "FullyReplicated",
    }


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
    """Return the arguments of each operation for an endpoint, in the order to send."""
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
    """Return the arguments of CreateModel and CreateTransformJob."""
    # an image is a request, and gets a file `NAME.out`
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


def aws_module(name: str) -> Any:
    """Import a module of the extra `sagemaker`."""
    remedy = "pip install 'PATH/kd[sagemaker]'"
    return import_optional(name, "kd-launch", "boto3 is not installed", remedy)


def validate(operation: str, request: Mapping[str, Any]) -> None:
    """Check a request by botocore's validator and by what that does not check."""
    session = aws_module("botocore.session")
    validation = aws_module("botocore.validate")
    service = session.get_session().get_service_model("sagemaker")
    shape = service.operation_model(operation).input_shape
    report = validation.ParamValidator().validate(request, shape)
    if report.has_errors():
        remedy = "See the options of kd-launch"
        lines = report.generate_report().splitlines()
        raise ConfigErrors([ConfigError(operation, line, "", remedy) for line in lines])
    errors = [
        *_violations(shape, request, operation),
        *limit_errors(operation, request),
    ]
    if errors:
        raise ConfigErrors(errors)


def _violations(shape: Any, value: Any, path: str) -> Iterator[KdError]:
    """Yield errors that botocore does not check but the service does."""
    for child in _children(shape, value, path):
        yield from _violations(*child)
    kind = shape.type_name
    limits = shape.metadata
    names = limits.get("enum")
    if kind == "string" and names and value not in names:
        near = did_you_mean(value, names) or "Correct it"
        yield ConfigError(path, f"is '{value}'", f"One of {len(names)} names", near)
    if kind == "string" and not _matches(limits.get("pattern", ""), value):
        yield ConfigError(path, f"is '{value[:80]}'", f"Text like {limits['pattern']}")
    size = len(value) if kind in ("string", "list", "map") else value
    if "max" in limits and kind != "structure" and size > limits["max"]:
        yield ConfigError(path, f"has {size}", f"At most {limits['max']}", "Shorten it")


def _children(shape: Any, value: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    if shape.type_name == "structure":
        for key, inner in value.items():
            yield shape.members[key], inner, f"{path}.{key}"
    elif shape.type_name == "list":
        for i, inner in enumerate(value):
            yield shape.member, inner, f"{path}[{i}]"
    elif shape.type_name == "map":
        for key, inner in value.items():
            yield shape.key, key, f"{path}.{key}"
            yield shape.value, inner, f"{path}.{key}"


def _matches(pattern: str, value: str) -> bool:
    try:
        return not pattern or re.fullmatch(f"(?:{pattern})", value) is not None
    except re.error:  # patterns are Java's; some have classes such as \\p{L}
        return True

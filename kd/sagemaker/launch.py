"""What SageMaker is asked to do, as plain data: a training job, an endpoint, a batch transform. Nothing is sent here.

Source: the API reference of CreateTrainingJob, CreateModel, CreateEndpointConfig and CreateTransformJob, as botocore's
service model has it. `validate` checks a request against that model.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kd.errors import ConfigError, ConfigErrors, KdError, MissingExtra, did_you_mean

CHECKPOINTS = "/opt/ml/checkpoints"
"""SageMaker copies this folder to S3 while a job runs, and back when it starts again after a spot interruption."""
INPUT = "/opt/ml/input/data"
TRAINERS, LOADERS = "dnn", "data"
"""Names of the instance groups."""
MUST_EXIST = ("data.root", "data.train", "data.val", "teacher.checkpoint", "student.checkpoint")
"""Keys that name files. A job finds none of this machine's files."""
XLA_INSTANCES, NEURON_INSTANCES = ("ml.trn1",), ("ml.trn2", "ml.trn3")
NUMBER = r"([0-9.]+(?:e[-+]?[0-9]+)?)"
METRICS = {
    "train:loss": rf"\| loss {NUMBER}",
    "train:lr": rf" lr {NUMBER} ",
    "train:images_per_second": rf" {NUMBER} images/s",
    "val:accuracy_percent": rf"\| val accuracy {NUMBER} %",
    "val:map_percent": rf"\| val mAP {NUMBER} %",
    "val:teacher_accuracy_percent": rf"\(teacher {NUMBER} %",
    "val:agreement_percent": rf"agreement {NUMBER} %",
}
"""What CloudWatch draws, read from the lines that `kd-train` prints where there is no terminal."""
DAY = 24 * 3600
"""Seconds that a job may wait for spot capacity, beside its run time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training job."""

    name: str
    """Of the job; SageMaker wants another one each time."""
    keys: Mapping[str, str]
    """The configuration as {"section.key": value}; see `kd.config.flat`."""
    image: str
    role: str
    output: str
    """`s3://bucket/prefix` for results and checkpoints."""
    instance: str
    count: int = 1
    data_group: tuple[str, int] | None = None
    """Instance type and count of the hosts that only decode images."""
    backend: str = ""
    spot: bool = False
    hours: float = 24.0
    """Longest run time."""
    volume: int = 100
    """GiB of disk of each instance."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Laid over the request: VpcConfig, Tags, ..."""


def training_request(job: Job) -> dict[str, Any]:
    """Return the arguments of CreateTrainingJob.

    A value `s3://...` of the configuration becomes a channel, and the key gets the folder where it appears. Checkpoints
    go to `<output>/checkpoints/<run.name>`, so that the next job of this name resumes.

    Raises:
        ConfigErrors: the configuration names files of this machine.
    """
    channels, keys = _channels(job.keys)
    keys |= {"run.folder": CHECKPOINTS, "teacher.fit.folder": f"{CHECKPOINTS}/teachers"}
    if kind := _backend(job, keys):
        keys["backend.kind"] = kind
    if job.data_group:
        keys["data.loader"] = "ray"
    run_seconds = int(job.hours * 3600)
    stop = {"MaxRuntimeInSeconds": run_seconds}
    if job.spot:
        stop["MaxWaitTimeInSeconds"] = run_seconds + DAY
    request = {
        "TrainingJobName": job.name,
        "AlgorithmSpecification": {
            "TrainingImage": job.image,
            "TrainingInputMode": "FastFile",
            "MetricDefinitions": [{"Name": name, "Regex": regex} for name, regex in METRICS.items()],
        },
        "RoleArn": job.role,
        "HyperParameters": dict(sorted(keys.items())),
        "OutputDataConfig": {"S3OutputPath": f"{job.output}/output"},
        "ResourceConfig": {**_instances(job), "VolumeSizeInGB": job.volume},
        "StoppingCondition": stop,
        "CheckpointConfig": {
            "S3Uri": f"{job.output}/checkpoints/{job.keys['run.name']}",
            "LocalPath": CHECKPOINTS,
        },
        "EnableManagedSpotTraining": job.spot,
    }
    if channels:
        request["InputDataConfig"] = channels
    return {**request, **job.extra}


def _instances(job: Job) -> dict[str, Any]:
    if job.data_group is None:
        return {"InstanceType": job.instance, "InstanceCount": job.count}
    kind, count = job.data_group
    groups = [(TRAINERS, job.instance, job.count), (LOADERS, kind, count)]
    return {
        "InstanceGroups": [
            {"InstanceGroupName": name, "InstanceType": kind, "InstanceCount": count} for name, kind, count in groups
        ]
    }


def _backend(job: Job, keys: Mapping[str, str]) -> str:
    """Return `backend.kind` where it must be set: asked for, or an instance that `auto` does not know."""
    if job.backend or keys.get("backend.kind", "auto") != "auto":
        return job.backend
    if job.instance.startswith(XLA_INSTANCES):
        return "xla"
    return "neuron" if job.instance.startswith(NEURON_INSTANCES) else ""


def _channels(given: Mapping[str, str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Turn `s3://...` values into channels; return those and the keys with the paths in the container."""
    channels, keys, errors = [], {}, []
    for key, value in given.items():
        if not value.startswith("s3://") or key.startswith("run."):  # run.mirror is written, not read
            if key in MUST_EXIST and value and "${" not in value:
                wrong = f"'{value}' is a path of this machine; a training job does not see it"
                errors.append(ConfigError(key, wrong, "s3://BUCKET/PREFIX", f"Upload it and set {key}=s3://..."))
            keys[key] = value
            continue
        name = re.sub(r"[^A-Za-z0-9-]", "-", key)
        folder, _, last = value.rpartition("/")
        pattern = re.search(r"[{*?\[]", folder)
        if pattern:
            errors.append(ConfigError(key, f"'{value}' has a pattern in its folder", "Patterns in the file name only"))
        shards = re.search(r"[{*?\[]", last)  # FastFile gives the folder, and the pattern is read in the container
        file = "." in last and not shards
        source = f"{folder}/" if shards else value
        channels.append(
            {
                "ChannelName": name,
                "DataSource": {
                    "S3DataSource": {
                        "S3DataType": "S3Prefix",
                        "S3Uri": source if shards or file else value.rstrip("/") + "/",
                        "S3DataDistributionType": "FullyReplicated",
                    }
                },
            }
        )
        keys[key] = posixpath.join(INPUT, name, last) if shards or file else posixpath.join(INPUT, name)
    if errors:
        raise ConfigErrors(errors)
    return channels, keys


# --------------------------------------------------------------------------------------------- endpoint, transform


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosting:
    """An export on SageMaker: an endpoint or a batch transform."""

    name: str
    image: str
    """With kd-serve: `Dockerfile`."""
    role: str
    model: str
    """`s3://.../model.tar.gz`."""
    instance: str
    count: int = 1


def hosting_requests(hosting: Hosting) -> dict[str, dict[str, Any]]:
    """Return the arguments of CreateModel, CreateEndpointConfig and CreateEndpoint, in the order of sending."""
    name = hosting.name
    variant = {
        "VariantName": "all",
        "ModelName": name,
        "InstanceType": hosting.instance,
        "InitialInstanceCount": hosting.count,
    }
    return {
        "CreateModel": model_request(hosting),
        "CreateEndpointConfig": {"EndpointConfigName": name, "ProductionVariants": [variant]},
        "CreateEndpoint": {"EndpointName": name, "EndpointConfigName": name},
    }


def model_request(hosting: Hosting) -> dict[str, Any]:
    """Return the arguments of CreateModel."""
    return {
        "ModelName": hosting.name,
        "ExecutionRoleArn": hosting.role,
        "PrimaryContainer": {"Image": hosting.image, "ModelDataUrl": hosting.model},
    }


def transform_requests(hosting: Hosting, images: str, output: str, at_once: int) -> dict[str, dict[str, Any]]:
    """Return the arguments of CreateModel and CreateTransformJob: each image is one request to kd-serve.

    Args:
        hosting: model and instances.
        images: `s3://bucket/prefix` of image files.
        output: `s3://bucket/prefix`; each image gets a file `NAME.out` with one JSON prediction.
        at_once: requests at once on an instance; kd-serve lets up to 32 wait.
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
        "TransformResources": {"InstanceType": hosting.instance, "InstanceCount": hosting.count},
    }
    return {"CreateModel": model_request(hosting), "CreateTransformJob": job}


# -------------------------------------------------------------------------------------------------------- validation


def validate(operation: str, request: Mapping[str, Any]) -> None:
    """Check a request by botocore's validator, and its lengths, patterns and enumerations, which that one leaves out.

    Raises:
        ConfigErrors: what is wrong, one line each.
        MissingExtra: boto3 is not installed.
    """
    try:
        from botocore.session import get_session
        from botocore.validate import ParamValidator
    except ImportError as error:
        raise MissingExtra("kd-launch", "boto3 is not installed", "", "pip install 'kd[sagemaker]'") from error
    shape = get_session().get_service_model("sagemaker").operation_model(operation).input_shape
    report = ParamValidator().validate(request, shape)
    if report.has_errors():
        lines = report.generate_report().splitlines()
        raise ConfigErrors([ConfigError(operation, line, "", "See the options of kd-launch") for line in lines])
    errors = list(_beyond(shape, request, operation))
    if errors:
        raise ConfigErrors(errors)


def _beyond(shape: Any, value: Any, where: str) -> Iterator[KdError]:
    """Yield what the service would refuse although botocore sends it."""
    kind, told = shape.type_name, shape.metadata
    for inner, given, place in _inside(shape, value, where):
        yield from _beyond(inner, given, place)
    if kind == "string" and told.get("enum") and value not in told["enum"]:
        near = did_you_mean(value, told["enum"]) or "Correct it"
        yield ConfigError(where, f"is '{value}'", f"One of {len(told['enum'])} names", near)
    if kind == "string" and not _matches(told.get("pattern", ""), value):
        yield ConfigError(where, f"is '{value[:80]}'", f"Text like {told['pattern']}", "Correct it")
    size = len(value) if kind in ("string", "list", "map") else value
    if "max" in told and kind != "structure" and size > told["max"]:
        yield ConfigError(where, f"has {size}", f"At most {told['max']}", "Shorten it")


def _inside(shape: Any, value: Any, where: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield shape, value and place of what a value holds."""
    if shape.type_name == "structure":
        yield from ((shape.members[key], inner, f"{where}.{key}") for key, inner in value.items())
    elif shape.type_name == "list":
        yield from ((shape.member, inner, f"{where}[{i}]") for i, inner in enumerate(value))
    elif shape.type_name == "map":
        for key, inner in value.items():
            yield shape.key, key, f"{where}.{key}"
            yield shape.value, inner, f"{where}.{key}"


def _matches(pattern: str, value: str) -> bool:
    try:
        return not pattern or re.fullmatch(f"(?:{pattern})", value) is not None
    except re.error:  # patterns are Java's; some have classes such as \\p{L}
        return True

"""Send requests to AWS and wait for their end; pack an export as `model.tar.gz`."""

import base64
import gzip
import io
import json
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image

from kd.cluster.requests import aws_module
from kd.core.errors import RunError, first_sentence
from kd.files.storage import atomic_folder, refuse_unlisted
from kd.parts import registry

LOGS = "/aws/sagemaker/TrainingJobs"
# seconds between polls: a job takes minutes to start, and AWS limits the rate of
# requests
POLL_SECONDS = 10.0
# milliseconds by which an event may appear after later events of other hosts
LATE_MS = 60_000
DONE = ("Completed", "InService")
FAILED = ("Failed", "Stopped", "OutOfService", "RollingBackFailed")
AGAIN = "Check credentials, region and names, then run the same command again"
Request = Mapping[str, Any]


def train(request: Request, follow: bool = True) -> None:
    """Start a training job and print its log until it ends."""
    name = request["TrainingJobName"]
    with _aws_errors("CreateTrainingJob"):
        sagemaker = _client("sagemaker")
        sagemaker.create_training_job(**request)
        print(f"training job {name} is created", flush=True)
        if not follow:
            return
        print(
            "Ctrl-C ends this log and not the job: aws sagemaker stop-training-job"
            f" --training-job-name {name}"
        )
        try:
            _wait(
                lambda: sagemaker.describe_training_job(TrainingJobName=name),
                "TrainingJobStatus",
                name,
                _Log(name),
            )
        except KeyboardInterrupt:
            print(f"training job {name} goes on")


def deploy(requests: Mapping[str, Request], export: Path, labels: Sequence[str]) -> str:
    """Put an export on an endpoint, send it one image, and return a line about it."""
    name = requests["CreateEndpoint"]["EndpointName"]
    remove = f"Remove it: aws sagemaker delete-endpoint --endpoint-name {name}"
    with _aws_errors("deploy"):
        sagemaker = _create(requests, export)
    print(f"endpoint {name} is created", flush=True)
    with _aws_errors("deploy", remove):
        try:
            _wait(
                lambda: sagemaker.describe_endpoint(EndpointName=name),
                "EndpointStatus",
                name,
            )
        except KeyboardInterrupt:
            print(f"endpoint {name} goes on. {remove}", flush=True)
            raise
        grey = io.BytesIO()
        Image.new("RGB", (64, 48), (127, 127, 127)).save(grey, "JPEG")
        image = base64.b64encode(grey.getvalue()).decode()
        answer = _client("sagemaker-runtime").invoke_endpoint(
            EndpointName=name,
            ContentType="application/json",
            Accept="application/json",
            Body=json.dumps({"image": image}),
        )
        body = answer["Body"].read()
    output = _output_text(body, labels)
    if not output:
        wrong = (
            f"endpoint {name} returned {body[:80]!r}, which is no"
            f" {'label' if labels else 'vector'} of '{export}'"
        )
        raise RunError("deploy", wrong, "", remove)
    return f"endpoint {name} is in service; a grey image is {output}. {remove}"


def _output_text(body: bytes, labels: Sequence[str]) -> str:
    """Return the label or the vector that an endpoint returned in words, or ""."""
    try:
        prediction = json.loads(body)["predictions"][0]
        if not labels:
            return f"a vector of {len(prediction['embedding'])} numbers"
        best = prediction["top"][0] if "labels" in prediction else prediction
        return f"'{best['label']}'" if best["label"] in labels else ""
    except (ValueError, KeyError, IndexError, TypeError):
        return ""


def transform(requests: Mapping[str, Request], export: Path) -> None:
    """Upload an export, start a batch transform with it, and wait for its end."""
    name = requests["CreateTransformJob"]["TransformJobName"]
    with _aws_errors("transform"):
        sagemaker = _create(requests, export)
        print(f"transform job {name} is created", flush=True)
        try:
            _wait(
                lambda: sagemaker.describe_transform_job(TransformJobName=name),
                "TransformJobStatus",
                name,
            )
        except KeyboardInterrupt:
            stop = (
                f"Stop it: aws sagemaker stop-transform-job --transform-job-name {name}"
            )
            print(f"transform job {name} goes on. {stop}", flush=True)
            raise


def _create(requests: Mapping[str, Request], export: Path) -> Any:
    """Upload an export for CreateModel, send all requests, and return the client."""
    sagemaker = _client("sagemaker")
    target = requests["CreateModel"]["PrimaryContainer"]["ModelDataUrl"]
    bucket, _, key = target.removeprefix("s3://").partition("/")
    _client("s3").put_object(Bucket=bucket, Key=key, Body=archive(export))
    print(f"uploaded {target}", flush=True)
    methods = {
        operation: method
        for method, operation in sagemaker.meta.method_to_api_mapping.items()
    }
    for operation, request in requests.items():
        getattr(sagemaker, methods[operation])(**request)
    return sagemaker


def _wait(
    describe: Callable[[], Mapping[str, Any]],
    key: str,
    name: str,
    print_log: Callable[[], None] = lambda: None,
) -> None:
    """Poll the status until it is final; print it when it changes."""
    before = ""
    while True:
        answer = describe()
        status = answer[key]
        secondary = answer.get("SecondaryStatus", status)
        line = status if secondary == status else f"{status} {secondary}"
        if line != before:
            print(f"{name}: {line}", flush=True)
        before = line
        print_log()
        if status in DONE:
            return
        if status in FAILED:
            reason = answer.get("FailureReason", "no reason is given")
            raise RunError("kd-launch", f"{name}: {status}: {reason}")
        time.sleep(POLL_SECONDS)


class _Log:
    """Print each event of a job's log once."""

    def __init__(self, job: str) -> None:
        self._client = _client("logs")
        self._job = job
        self._since = 0
        self._printed: set[str] = set()

    def __call__(self) -> None:
        pages = self._client.get_paginator("filter_log_events").paginate(
            logGroupName=LOGS,
            logStreamNamePrefix=f"{self._job}/",
            startTime=self._since,
        )
        newest = self._since
        with suppress(self._client.exceptions.ResourceNotFoundException):  # no log yet
            for event in chain.from_iterable(page["events"] for page in pages):
                if event["eventId"] not in self._printed:
                    self._printed.add(event["eventId"])
                    print(event["message"], flush=True)
                newest = max(newest, event["timestamp"])
        self._since = max(0, newest - LATE_MS)


def _client(service: str) -> Any:
    return aws_module("boto3").client(service)


@contextmanager
def _aws_errors(step: str, remedy: str = AGAIN) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("botocore.", "boto3.")):
            raise
        raise RunError(step, first_sentence(error), "", remedy) from error


def write_archive(export: Path) -> Path:
    """Write `<export>-sagemaker/model.tar.gz` and return its path."""
    folder = export.parent / f"{export.name}-sagemaker"
    refuse_unlisted(folder, ["model.tar.gz"], "--sagemaker")
    with atomic_folder(folder, config_path="--sagemaker") as draft:
        (draft / "model.tar.gz").write_bytes(archive(export))
    return folder / "model.tar.gz"


def archive(export: Path) -> bytes:
    """Return `model.tar.gz` for `kd-serve`, the same bytes for the same files."""
    packed = io.BytesIO()
    graphs = registry.graphs()
    never_read = {"model.safetensors", *(name for name in graphs if graphs[name].code)}
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="") as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for path in sorted(export.iterdir()):
            if path.is_file() and path.name not in never_read:
                content = path.read_bytes()
                entry = tarfile.TarInfo(path.name)
                entry.size = len(content)
                entry.mode = 0o644
                tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()

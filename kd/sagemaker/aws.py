"""Send what `launch` built to AWS, wait for its end, and print its log."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from kd.errors import MissingExtra, RunError
from kd.sagemaker.archives import container_archive

LOGS = "/aws/sagemaker/TrainingJobs"
POLL_SECONDS = 10.0
LATE_MS = 60_000
"""Log events may appear up to so long after younger ones of another host."""
DONE, FAILED = ("Completed", "InService"), ("Failed", "Stopped", "OutOfService", "RollingBackFailed")
Request = Mapping[str, Any]


def train(request: Request, follow: bool = True, poll: float = POLL_SECONDS) -> None:
    """Start a training job. Print its log until it ends.

    Raises:
        RunError: AWS refuses the request, cannot be reached, or the job failed.
    """
    name = request["TrainingJobName"]
    with _told("CreateTrainingJob"):
        sagemaker = _client("sagemaker")
        sagemaker.create_training_job(**request)
        print(f"training job {name} is created", flush=True)
        if not follow:
            return
        print(f"Ctrl-C ends this log and not the job: aws sagemaker stop-training-job --training-job-name {name}")
        log = _Log(name)
        try:
            _wait(lambda: sagemaker.describe_training_job(TrainingJobName=name), "TrainingJobStatus", name, poll, log)
        except KeyboardInterrupt:
            print(f"training job {name} goes on")


def deploy(requests: Mapping[str, Request], export: Path, model: str, labels: Sequence[str]) -> str:
    """Upload an export, create its endpoint, wait until it is in service, and ask it for one image.

    Args:
        requests: what `launch.hosting_requests` returned.
        export: the export folder.
        model: `s3://.../model.tar.gz`, where it is uploaded.
        labels: of the export; the answer must be one of them.

    Returns:
        What the endpoint answered, and how to remove it.

    Raises:
        RunError: a step failed. What was created before stays, and is named.
    """
    name = requests["CreateEndpoint"]["EndpointName"]
    remove = f"Remove it: aws sagemaker delete-endpoint --endpoint-name {name}"
    with _told("deploy"):
        _upload(export, model)
        sagemaker = _client("sagemaker")
        sagemaker.create_model(**requests["CreateModel"])
        sagemaker.create_endpoint_config(**requests["CreateEndpointConfig"])
        sagemaker.create_endpoint(**requests["CreateEndpoint"])
        print(f"endpoint {name} is created", flush=True)
        with _going_on(f"endpoint {name} goes on. {remove}"):
            _wait(lambda: sagemaker.describe_endpoint(EndpointName=name), "EndpointStatus", name, POLL_SECONDS)
        grey = io.BytesIO()
        Image.new("RGB", (64, 48), (127, 127, 127)).save(grey, "JPEG")
        question = json.dumps({"image": base64.b64encode(grey.getvalue()).decode()})
        answer = _client("sagemaker-runtime").invoke_endpoint(
            EndpointName=name, ContentType="application/json", Accept="application/json", Body=question
        )
        body = answer["Body"].read()
    try:
        found = json.loads(body)["predictions"][0]
        label = found["top"][0]["label"] if "labels" in found else found["label"]
    except (ValueError, KeyError, IndexError, TypeError):
        label = None
    if label not in labels:
        wrong = f"endpoint {name} answered {body[:80]!r}, which is no label of '{export}'"
        raise RunError("deploy", wrong, "", remove)
    return f"endpoint {name} is in service; a grey image is '{label}'. {remove}"


def transform(requests: Mapping[str, Request], export: Path, model: str, poll: float = POLL_SECONDS) -> None:
    """Upload an export, start a batch transform and wait for its end.

    Raises:
        RunError: a step failed, or the job did.
    """
    name = requests["CreateTransformJob"]["TransformJobName"]
    with _told("transform"):
        _upload(export, model)
        sagemaker = _client("sagemaker")
        sagemaker.create_model(**requests["CreateModel"])
        sagemaker.create_transform_job(**requests["CreateTransformJob"])
        print(f"transform job {name} is created", flush=True)
        stop = f"Stop it: aws sagemaker stop-transform-job --transform-job-name {name}"
        with _going_on(f"transform job {name} goes on. {stop}"):
            _wait(lambda: sagemaker.describe_transform_job(TransformJobName=name), "TransformJobStatus", name, poll)


@contextmanager
def _going_on(line: str) -> Iterator[None]:
    """After Ctrl-C, say what AWS goes on with."""
    try:
        yield
    except KeyboardInterrupt:
        print(line, flush=True)
        raise


def _upload(export: Path, target: str) -> None:
    bucket, _, key = target.removeprefix("s3://").partition("/")
    _client("s3").put_object(Bucket=bucket, Key=key, Body=container_archive(export))
    print(f"uploaded {target}", flush=True)


def _wait(
    describe: Callable[[], Mapping[str, Any]],
    key: str,
    name: str,
    poll: float,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Ask for the status until it is final; print it when it changes."""
    before = ""
    while True:
        told = describe()
        status = told[key]
        shown = " ".join({status: 0, told.get("SecondaryStatus", status): 0})
        if shown != before:
            print(f"{name}: {shown}", flush=True)
        before = shown
        tick()
        if status in DONE:
            return
        if status in FAILED:
            raise RunError("kd-launch", f"{name}: {status}: {told.get('FailureReason', 'no reason is given')}")
        time.sleep(poll)


class _Log:
    """Prints each event of a job's log once."""

    def __init__(self, job: str) -> None:
        self._client, self._job = _client("logs"), job
        self._since, self._seen = 0, set[str]()

    def __call__(self) -> None:
        """Print what is new."""
        told: dict[str, Any] = {"logGroupName": LOGS, "logStreamNamePrefix": f"{self._job}/", "startTime": self._since}
        newest = self._since
        while True:
            try:
                page = self._client.filter_log_events(**told)
            except self._client.exceptions.ResourceNotFoundException:  # nothing is logged yet
                return
            for event in page["events"]:
                if event["eventId"] not in self._seen:
                    self._seen.add(event["eventId"])
                    print(event["message"], flush=True)
                newest = max(newest, event["timestamp"])
            if not page.get("nextToken"):
                break
            told["nextToken"] = page["nextToken"]
        self._since = max(0, newest - LATE_MS)


def _client(service: str) -> Any:
    try:
        import boto3
    except ImportError as error:
        raise MissingExtra("kd-launch", "boto3 is not installed", "", "pip install 'kd[sagemaker]'") from error
    return boto3.client(service)


@contextmanager
def _told(step: str) -> Iterator[None]:
    """Turn an error of AWS into one line."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("botocore.", "boto3.")):
            raise
        reason = " ".join(str(error).split())
        raise RunError(
            step, reason, "", "Check credentials, region and names, then run the same command again"
        ) from error

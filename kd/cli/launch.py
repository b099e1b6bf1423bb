"""Run kd-launch: training jobs, endpoints and batch transforms on SageMaker.

`kd-launch CONFIG --instance TYPE`, `kd-launch deploy EXPORT`, `kd-launch transform
EXPORT IMAGES`.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd.cli.command import (
    Parser,
    add_fields,
    from_options,
    new_parser,
    run_guarded,
    whole_number,
)
from kd.cluster.requests import IMAGE_RUNTIMES, Hosting, Job
from kd.core.errors import ConfigError, ConfigErrors
from kd.files.json_file import read_json

if TYPE_CHECKING:
    from kd.deploy.serve.model import Description

ROLE = "KD_ROLE"  # an environment variable
OUTPUT = "KD_OUTPUT"  # an environment variable
COUNT = whole_number(1, 999_999)
HERE = {"config", "overrides", "local", "backend", "dry_run"}  # options of --local
MOST_HOURS = 28 * 24  # hours of SageMaker's longest job


def launch(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["deploy"]:
        return _deploy(argv[1:])
    if argv[:1] == ["transform"]:
        return _transform(argv[1:])
    return _train(argv)


def _train(argv: Sequence[str]) -> int:
    parser = new_parser(
        "kd-launch",
        "Train CONFIG on SageMaker and follow its log. A value s3://... of the"
        " configuration becomes a channel of the job. Also: kd-launch deploy EXPORT,"
        " kd-launch transform EXPORT IMAGES.",
        "kd-launch food.yaml data.root=s3://BUCKET/food --instance ml.p4d.24xlarge"
        " --count 4 --spot --dry-run",
    )
    add = parser.add_argument
    add_fields(parser, Job)
    add(
        "--extra",
        metavar="FILE",
        type=Path,
        help="JSON laid over the request: VpcConfig, Tags, ...",
    )
    add(
        "--follow",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print the job's log",
    )
    text = "try the job on this machine: dnn=1,data=2"
    add("--local", metavar="GROUPS", type=_local_groups, help=text)
    _add_account_options(parser, "KD_TRAIN_IMAGE", "Dockerfile.train")
    options = parser.read(argv)
    if options.local:
        refused = [
            f"--{'no-' * (name == 'follow')}{name.replace('_', '-')}"
            for name in sorted(vars(options).keys() - HERE)
            if getattr(options, name) != parser.get_default(name)
        ]
        if refused:
            parser.error(
                f"{', '.join(refused)}: for jobs on SageMaker, not for --local"
            )
        return _train_here(options)

    def command() -> None:
        from kd import config
        from kd.cluster.hosts import overrides
        from kd.cluster.requests import training_request
        from kd.config.flat import file_keys, flat

        keys = flat(options.config, options.overrides)
        _complete(options)
        settings = config.load(
            {}, [f"{key}={text}" for key, text in keys.items()], here=False
        )
        extra = {}
        if options.extra:
            remedy = "Give a JSON object"
            extra = read_json(
                options.extra, "--extra", remedy, kind=ConfigError, required=True
            )
        job = from_options(
            Job,
            options,
            name=_unique_name(keys["run.name"]),
            keys=keys,
            files=list(file_keys(settings)),
            extra=extra,
        )
        plan = _core_plan(job)
        request = training_request(job)
        # with the changes by options
        config.load({}, overrides(request["HyperParameters"]), here=False)
        send = _validate({"CreateTrainingJob": request}, options.dry_run)
        for line in plan:
            print(line, file=sys.stderr)  # the requests of a dry run are JSON
        if send:
            from kd.cluster import aws

            aws.train(request, options.follow)

    return run_guarded(command)


def _core_plan(job: Job) -> list[str]:
    """Return lines on whether the cores of a job can feed its accelerators."""
    from kd.config import instances

    if job.images_per_second and not job.view_ms:
        wrong = "is not given, but --images-per-second is"
        remedy = "Take loading of kd-train CONFIG --check"
        raise ConfigError("--view-ms", wrong, "Milliseconds per view", remedy)
    usd = float(job.keys.get("price.per_hour", 0.0))
    if not job.view_ms:
        return []
    return instances.core_plan(
        job.instance,
        job.count,
        job.view_ms,
        job.images_per_second,
        job.data_group,
        usd,
    )


def _train_here(options: argparse.Namespace) -> int:
    """Run the job's hosts on this machine, and return the exit code of its training."""
    code = 0

    def command() -> None:
        from kd import config
        from kd.cluster.hosts import run_job

        nonlocal code
        argv = [options.config, *options.overrides]
        if any(name.startswith("data") for name in options.local):
            argv.append("data.loader=ray")
        if options.backend:
            argv.append(f"backend.kind={options.backend}")
        config.load(options.config, argv[1:], cluster=False)  # the hosts start it
        if options.dry_run:
            print(
                "the configuration is valid; without --dry-run these groups start"
                f" here: {options.local}"
            )
        else:
            code = run_job(options.local, argv)

    return run_guarded(command) or code


def _deploy(argv: Sequence[str]) -> int:
    parser = _hosting_parser(
        "kd-launch deploy",
        "Put an export on a SageMaker endpoint, wait until it is in service, and send"
        " it one image.",
        "kd-launch deploy runs/vit_food/export --instance ml.c5.xlarge",
    )
    options = parser.read(argv)

    def command() -> None:
        from kd.cluster.requests import hosting_requests

        hosting, model = _hosting(options)
        requests = hosting_requests(hosting)
        if _validate(requests, options.dry_run):
            from kd.cluster import aws

            print(aws.deploy(requests, model.folder, model.labels))

    return run_guarded(command)


def _transform(argv: Sequence[str]) -> int:
    parser = _hosting_parser(
        "kd-launch transform",
        "Classify all images below an S3 prefix in a batch transform job. Each image"
        " gets a file NAME.out (JSON).",
        "kd-launch transform runs/vit_food/export s3://BUCKET/images --instance"
        " ml.c5.2xlarge --count 4",
    )
    add = parser.add_argument
    add("images", metavar="IMAGES", help="s3://BUCKET/PREFIX of image files")
    add(
        "--to",
        metavar="S3URI",
        default="",
        help="where results go (default: OUTPUT/transform/NAME)",
    )
    text = "concurrent requests per instance (default 8)"
    add("--at-once", metavar="N", type=COUNT, default=8, help=text)
    options = parser.read(argv)

    def command() -> None:
        from kd.cluster.requests import transform_requests

        hosting, model = _hosting(options)
        output = options.to or f"{options.output}/transform/{hosting.name}"
        requests = transform_requests(hosting, options.images, output, options.at_once)
        if _validate(requests, options.dry_run):
            from kd.cluster import aws

            aws.transform(requests, model.folder)
            print(f"results: {output}")

    return run_guarded(command)


# --------------------------------------------------------------------------------
# options


def _add_account_options(
    parser: argparse.ArgumentParser, variable: str, file: str
) -> None:
    add = parser.add_argument
    add(
        "--image",
        metavar="URI",
        help=f"image in ECR, built from {file} (default: ${variable})",
    )
    add("--role", metavar="ARN", help=f"role for SageMaker (default: ${ROLE})")
    text = f"s3://BUCKET/PREFIX of all output (default: ${OUTPUT})"
    add("--output", metavar="S3URI", help=text)
    parser.set_defaults(variables={"image": variable, "role": ROLE, "output": OUTPUT})
    add(
        "--dry-run",
        action="store_true",
        help="check everything, print the requests, send nothing",
    )


def _hosting_parser(command: str, summary: str, example: str) -> Parser:
    parser = new_parser(command, summary, example, with_config=False)
    parser.add_argument(
        "export", metavar="EXPORT", type=Path, help="folder written by kd-export"
    )
    add_fields(parser, Hosting)
    parser.add_argument(
        "--name",
        default="",
        help="name of everything created (default: the run's name and the time)",
    )
    _add_account_options(parser, "KD_SERVE_IMAGE", "Dockerfile")
    return parser


def _complete(options: argparse.Namespace) -> None:
    """Take image, role and output from the environment where no option gives them."""
    errors = []
    for name, variable in options.variables.items():
        setattr(options, name, getattr(options, name) or os.environ.get(variable, ""))
        if not getattr(options, name):
            remedy = f"Give it, or set {variable}"
            errors.append(ConfigError(f"--{name}", "is not given", "", remedy))
    if options.output and not re.match(r"s3://[^/]+", options.output):
        wrong = f"is '{options.output}'"
        errors.append(ConfigError("--output", wrong, "s3://BUCKET/PREFIX"))
    if not 0 < getattr(options, "hours", 1.0) <= MOST_HOURS:  # false for NaN
        wrong = f"is {options.hours:g}"
        errors.append(ConfigError("--hours", wrong, f"Above 0, at most {MOST_HOURS}"))
    if not options.instance:
        remedy = "Give it: ml.g5.xlarge"
        errors.append(
            ConfigError("--instance", "is not given", "An instance type", remedy)
        )
    if errors:
        raise ConfigErrors(errors)
    options.output = options.output.rstrip("/")


def _hosting(options: argparse.Namespace) -> tuple[Hosting, "Description"]:
    """Describe an export, whose graph the image must run, and where it is hosted."""
    from kd.deploy.serve.model import describe
    from kd.parts import registry

    model = describe(options.export)
    runtime = registry.graphs()[model.file].runtime
    if runtime not in IMAGE_RUNTIMES:
        wrong = f"'{model.file}' needs {runtime}, which the image does not have"
        raise ConfigError(
            "EXPORT",
            wrong,
            f"Graphs for {' or '.join(IMAGE_RUNTIMES)}",
            "Export anew without --formats",
        )
    _complete(options)
    name = options.name or _unique_name(model.name)
    archive = f"{options.output}/models/{name}/model.tar.gz"
    return from_options(Hosting, options, name=name, model=archive), model


def _validate(requests: Mapping[str, Mapping[str, Any]], dry_run: bool) -> bool:
    """Check requests and return whether to send them; a dry run prints them instead."""
    from kd.cluster.requests import validate

    for operation, request in requests.items():
        validate(operation, request)
    if dry_run:
        print(json.dumps(requests, indent=2))
    return not dry_run


def _unique_name(name: str) -> str:
    """Return a name that SageMaker accepts and that no other job has."""
    letters = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40]
    return f"{letters}-{time.strftime('%Y%m%d-%H%M%S')}"


def _local_groups(text: str) -> dict[str, int]:
    pairs = re.findall(r"([A-Za-z][A-Za-z0-9_-]*)=([1-9][0-9]?)(?:,|$)", text)
    groups = {name: int(count) for name, count in pairs}
    complete = ",".join(f"{name}={count}" for name, count in groups.items()) == text
    fits = complete and sum(groups.values()) <= 250
    if not fits or all(name.startswith("data") for name in groups):
        allowed = (
            "a list of groups such as dnn=1,data=2, one that trains, of at most 250"
            " hosts"
        )
        raise argparse.ArgumentTypeError(f"'{text}' is not {allowed}")
    return groups

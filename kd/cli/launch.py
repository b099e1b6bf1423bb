"""`kd-launch CONFIG --instance TYPE`, `kd-launch deploy EXPORT`, `kd-launch transform EXPORT IMAGES`: SageMaker."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kd.cli._common import guarded, parser
from kd.errors import ConfigError, ConfigErrors

ROLE, OUTPUT = "KD_ROLE", "KD_OUTPUT"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["deploy"]:
        return _deploy(given[1:])
    if given[:1] == ["transform"]:
        return _transform(given[1:])
    return _train(given)


def _train(argv: Sequence[str]) -> int:
    made = parser(
        "kd-launch",
        "Train CONFIG on SageMaker and follow its log. A value s3://... of the configuration becomes a channel of the "
        "job. Also: kd-launch deploy EXPORT, kd-launch transform EXPORT IMAGES.",
        "kd-launch food.yaml data.root=s3://BUCKET/food --instance ml.p4d.24xlarge --count 4 --spot --dry-run",
    )
    made.add_argument("--instance", metavar="TYPE", default="", help="instance type of the trainers")
    made.add_argument("--count", metavar="N", type=_whole, default=1, help="how many trainers (default 1)")
    made.add_argument("--data-group", metavar="TYPE:N", type=_group, help="hosts that only decode images")
    made.add_argument("--backend", metavar="KIND", default="", help="backend.kind: cuda, smddp, xla or neuron")
    made.add_argument("--spot", action="store_true", help="spot instances; the job resumes after an interruption")
    made.add_argument("--hours", metavar="H", type=float, default=24.0, help="longest run time (default 24)")
    made.add_argument("--volume", metavar="GIB", type=_whole, default=100, help="disk of each instance (default 100)")
    made.add_argument("--extra", metavar="FILE", type=Path, help="JSON laid over the request: VpcConfig, Tags, ...")
    made.add_argument("--follow", action=argparse.BooleanOptionalAction, default=True, help="print the job's log")
    made.add_argument("--local", metavar="GROUPS", type=_groups, help="try the job on this machine: dnn=1,data=2")
    _common(made, "KD_TRAIN_IMAGE", "Dockerfile.train")
    given = made.parse_intermixed_args(argv)
    if given.local:
        return _here(given)

    def command() -> None:
        from kd import config
        from kd.config.flat import flat
        from kd.sagemaker.launch import Job, training_request

        keys = flat(given.config, given.overrides)
        job = Job(
            name=_unique(keys["run.name"]),
            keys=keys,
            **_needed(given),
            instance=given.instance,
            count=given.count,
            data_group=given.data_group,
            backend=given.backend,
            spot=given.spot,
            hours=given.hours,
            volume=given.volume,
            extra=_extra(given.extra),
        )
        request = training_request(job)
        final = request["HyperParameters"].items()
        config.load({}, [f"{key}={text}" for key, text in final], here=False)  # with what the options have changed
        if _shown({"CreateTrainingJob": request}, given.dry_run):
            return
        from kd.sagemaker import aws

        aws.train(request, given.follow)

    return guarded(command)


def _here(given: argparse.Namespace) -> int:
    """Run the job's hosts on this machine, and return the exit code of its training."""
    codes: list[int] = []

    def command() -> None:
        from kd import config
        from kd.sagemaker.local import launch

        argv = [given.config, *given.overrides]
        if any(name.startswith("data") for name in given.local):
            argv.append("data.loader=ray")
        config.load(given.config, argv[1:], cluster=False)  # the hosts start it
        codes.append(launch(given.local, argv))

    return guarded(command) or codes[0]


def _deploy(argv: Sequence[str]) -> int:
    made = parser(
        "kd-launch deploy",
        "Put an export on a SageMaker endpoint, wait until it is in service, and ask it for one image.",
        "kd-launch deploy runs/vit_food/export --instance ml.c5.xlarge",
        with_config=False,
    )
    _hosting_options(made)
    given = made.parse_args(argv)

    def command() -> None:
        from kd.sagemaker import launch
        from kd.serve.model import describe

        told = describe(given.export)
        hosting = launch.Hosting(**_hosted(given, told.name))
        requests = launch.hosting_requests(hosting)
        if _shown(requests, given.dry_run):
            return
        from kd.sagemaker import aws

        print(aws.deploy(requests, given.export, hosting.model, told.labels))

    return guarded(command)


def _transform(argv: Sequence[str]) -> int:
    made = parser(
        "kd-launch transform",
        "Classify all images below an S3 prefix in a batch transform job. Each image gets a file NAME.out (JSON).",
        "kd-launch transform runs/vit_food/export s3://BUCKET/images --instance ml.c5.2xlarge --count 4",
        with_config=False,
    )
    _hosting_options(made, "images")
    made.add_argument("--to", metavar="S3URI", default="", help="where results go (default: OUTPUT/transform/NAME)")
    made.add_argument(
        "--at-once", metavar="N", type=_whole, default=8, help="requests at once per instance (default 8)"
    )
    given = made.parse_args(argv)

    def command() -> None:
        from kd.sagemaker import launch
        from kd.serve.model import describe

        hosting = launch.Hosting(**_hosted(given, describe(given.export).name))
        output = given.to or f"{given.output}/transform/{hosting.name}"
        requests = launch.transform_requests(hosting, given.images, output, given.at_once)
        if _shown(requests, given.dry_run):
            return
        from kd.sagemaker import aws

        aws.transform(requests, given.export, hosting.model)
        print(f"results: {output}")

    return guarded(command)


# ------------------------------------------------------------------------------------------------------------- options


def _common(made: argparse.ArgumentParser, variable: str, file: str) -> None:
    made.add_argument("--image", metavar="URI", help=f"image in ECR, built from {file} (default: ${variable})")
    made.add_argument("--role", metavar="ARN", help=f"role that SageMaker takes (default: ${ROLE})")
    made.add_argument(
        "--output", metavar="S3URI", help=f"s3://BUCKET/PREFIX of all that is written (default: ${OUTPUT})"
    )
    made.set_defaults(variables={"image": variable, "role": ROLE, "output": OUTPUT})
    made.add_argument("--dry-run", action="store_true", help="check the requests, print them and send nothing")


def _hosting_options(made: argparse.ArgumentParser, *further: str) -> None:
    made.add_argument("export", metavar="EXPORT", type=Path, help="what kd-export wrote")
    for name in further:
        made.add_argument(name, metavar=name.upper(), help="s3://BUCKET/PREFIX of image files")
    made.add_argument("--instance", metavar="TYPE", required=True, help="instance type")
    made.add_argument("--count", metavar="N", type=_whole, default=1, help="how many instances (default 1)")
    made.add_argument("--name", default="", help="of all that is created (default: the run's name and the time)")
    _common(made, "KD_SERVE_IMAGE", "Dockerfile")


def _needed(given: argparse.Namespace) -> dict[str, str]:
    """Return the options that every request needs.

    Raises:
        ConfigErrors: one is missing.
    """
    found = {name: getattr(given, name) or os.environ.get(variable, "") for name, variable in given.variables.items()}
    errors = [
        ConfigError(f"--{name}", "is not given", "", f"Give it, or set {given.variables[name]}")
        for name, value in found.items()
        if not value
    ]
    if found["output"] and not re.match(r"s3://[^/]+", found["output"]):
        errors.append(ConfigError("--output", f"is '{found['output']}'", "s3://BUCKET/PREFIX", "Correct it"))
    if not given.instance:
        errors.append(ConfigError("--instance", "is not given", "An instance type", "Give it: ml.g5.xlarge"))
    if errors:
        raise ConfigErrors(errors)
    given.output = found["output"] = found["output"].rstrip("/")
    return found


def _hosted(given: argparse.Namespace, name: str) -> dict[str, Any]:
    needed = _needed(given)
    name = given.name or _unique(name)
    model = f"{needed.pop('output')}/models/{name}/model.tar.gz"
    return {**needed, "name": name, "model": model, "instance": given.instance, "count": given.count}


def _shown(requests: Mapping[str, Mapping[str, Any]], dry_run: bool) -> bool:
    """Check requests, and print them if nothing is to be sent."""
    from kd.sagemaker.launch import validate

    for operation, request in requests.items():
        validate(operation, request)
    if dry_run:
        print(json.dumps(requests, indent=2))
    return dry_run


def _extra(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError("--extra", f"'{path}' cannot be read ({error})", "A JSON object", "Correct it") from error


def _unique(name: str) -> str:
    """Return a name that SageMaker accepts and that no other job has."""
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')[:40]}-{time.strftime('%Y%m%d-%H%M%S')}"


def _groups(text: str) -> dict[str, int]:
    groups = dict(re.findall(r"([A-Za-z][A-Za-z0-9_-]*)=([1-9][0-9]?)(?:,|$)", text))
    training = [count for name, count in groups.items() if not name.startswith("data")]
    if not training or ",".join(f"{name}={count}" for name, count in groups.items()) != text:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of groups such as dnn=1,data=2, one that trains")
    if sum(map(int, groups.values())) > 250:
        raise argparse.ArgumentTypeError(f"'{text}' has more than 250 hosts")
    return {name: int(count) for name, count in groups.items()}


def _whole(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number >= 1")
    return int(text)


def _group(text: str) -> tuple[str, int]:
    kind, colon, count = text.partition(":")
    if not kind or not colon:
        raise argparse.ArgumentTypeError(f"'{text}' is not TYPE:N, such as ml.c5.18xlarge:2")
    return kind, _whole(count)


if __name__ == "__main__":
    sys.exit(main())

"""What kd-launch asks of SageMaker, and moto's answers to it over HTTP. Nothing here
reaches AWS.
"""

import dataclasses
import io
import json
import re
import shutil
import tarfile
import time
import urllib.request
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from botocore.session import Session
from botocore.validate import ParamValidator

from kd import config
from kd.cluster import aws as sending
from kd.cluster import requests
from kd.cluster.cloudwatch import metric_definitions
from kd.cluster.hosts import hyperparameters
from kd.config.explain import explain
from kd.config.flat import flat
from kd.config.schema import Member
from kd.core.errors import ConfigErrors, RunError
from kd.core.keys import declaration, fields_of
from kd.core.types import State
from kd.files.manifest import checksum
from kd.files.run_dir import RunDir
from kd.jobs.progress.console import Console
from kd.parts import registry
from kd.parts.tasks.embedding import SCORES as EMBEDDING
from kd.parts.tasks.label_sets import SCORES as LABEL_SETS

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/kd:1"
ROLE = "arn:aws:iam::123456789012:role/kd"
OUTPUT = "s3://bucket/kd"
LISTS = (
    "data.kind=csv",
    "data.train_list=../meta/train.txt",
    "data.val_list=meta/val.txt",
)
GIVEN = ("--image", IMAGE, "--role", ROLE, "--output", OUTPUT)


@pytest.fixture
def food(settings, tmp_path):
    """A configuration whose data lies on S3."""
    settings["data"]["root"] = "s3://bucket/food"
    settings["teacher"]["model"] = "vit_tiny_patch16_224"
    settings["backend"] = {"kind": "auto"}
    path = tmp_path / "food_1.yaml"
    del settings["run"]["name"]
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def dry(command, *argv):
    """Return the requests that a dry run prints."""
    answer = command("launch", *argv, *GIVEN, "--dry-run")
    assert answer.code == 0, answer
    return json.loads(answer.out)


def test_a_configuration_survives_as_texts(food):
    """Each kind of value, references and lists among them."""
    overrides = [
        "optimizer.lr=5e-5",
        "run.trackers=[]",
        "teacher.args={}",
        "run.seed=007",
        "data.augment.flip=1",
    ]
    overrides += [
        "teacher.args={act_layer: '1e3'}",
        "run.folder=${oc.env:NOWHERE,runs}",
        "losses.0.weight=2",
    ]
    keys = flat(food, overrides)
    assert keys["run.name"] == "food_1"
    assert keys["run.folder"] == "${oc.env:NOWHERE,runs}"
    again = config.load({}, [f"{key}={text}" for key, text in keys.items()])
    assert config.to_dict(again) == config.to_dict(config.load(food, overrides))


WEIGHTS = ", ".join(f"{1 + number / 7:.17g}" for number in range(140))
LONG = {
    "a long value": (f"losses=[{{kind: ce, class_weights: [{WEIGHTS}]}}]",),
    "many keys": tuple(
        f"teacher.args.key_{number}='crème {number}'" for number in range(120)
    ),
}


@pytest.mark.parametrize("kind", LONG)
def test_a_configuration_of_any_length_reaches_the_job(food, command, tmp_path, kind):
    """SageMaker takes at most 100 hyperparameters of at most 2,500 characters."""
    sent = dry(command, food, *LONG[kind], *G5)["CreateTrainingJob"]["HyperParameters"]
    assert len(sent) <= 100
    assert max(map(len, sent.values())) <= 2500
    file = tmp_path / "hyperparameters.json"
    file.write_text(json.dumps(sent | {"sagemaker_region": "us-east-1"}))
    received = config.load({}, hyperparameters(file), here=False)
    expected = config.load(
        food,
        [*LONG[kind], "data.root=/opt/ml/input/data/data-root", "backend.kind=cuda"],
        here=False,
    )
    for section in ("losses", "teacher", "data", "student", "optimizer", "backend"):
        read_section = getattr(received, section)
        expected_section = getattr(expected, section)
        if section == "teacher":
            # The fit's folder is that of the checkpoints.
            expected_section = dataclasses.replace(
                expected_section, fit=read_section.fit
            )
        assert read_section == expected_section


P4D = ("--instance", "ml.p4d.24xlarge")
G5 = ("--instance", "ml.g5.xlarge")
GROUPS = [
    {"InstanceGroupName": "dnn", "InstanceType": "ml.p4d.24xlarge", "InstanceCount": 1},
    {"InstanceGroupName": "data", "InstanceType": "ml.c5.18xlarge", "InstanceCount": 2},
]


@pytest.mark.parametrize(
    ("options", "resources", "extra"),
    [
        (
            (*P4D, "--count", "4"),
            {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 4},
            {},
        ),
        (
            (*P4D, "--backend", "smddp"),
            {"InstanceType": "ml.p4d.24xlarge"},
            {"backend.kind": "smddp"},
        ),
        (
            (*G5, "backend.kind=smddp", "backend.fallback=nccl"),
            {},
            {"backend.kind": "smddp"},
        ),
        (("--instance", "ml.trn1.32xlarge"), {}, {"backend.kind": "xla"}),
        (("--instance", "ml.trn2.48xlarge"), {}, {"backend.kind": "neuron"}),
        (G5, {}, {"backend.kind": "cuda"}),
        (("--instance", "ml.c5.xlarge"), {}, {"backend.kind": "cpu"}),
        (
            (*P4D, "--data-group", "ml.c5.18xlarge:2"),
            {"InstanceGroups": GROUPS},
            {"data.loader": "ray"},
        ),
    ],
    ids=[
        "one group",
        "smddp",
        "smddp or nccl",
        "trn1",
        "trn2",
        "g5",
        "c5",
        "two groups",
    ],
)
def test_botocore_accepts_the_request(options, resources, extra, food, command):
    request = dry(command, food, *options)["CreateTrainingJob"]
    resource_config = request["ResourceConfig"]
    assert {key: resource_config[key] for key in resources} == resources
    assert ("InstanceGroups" in resource_config) != ("InstanceType" in resource_config)
    if "InstanceGroups" in resource_config:  # Ray asks each host for it
        assert request["Environment"]["RAY_AUTH_MODE"] == "token"
        assert len(request["Environment"]["RAY_AUTH_TOKEN"]) == 64
    keys = request["HyperParameters"]
    assert {key: keys[key] for key in extra} == extra
    assert (
        keys["run.folder"]
        == request["CheckpointConfig"]["LocalPath"]
        == "/opt/ml/checkpoints"
    )
    assert request["CheckpointConfig"]["S3Uri"] == "s3://bucket/kd/checkpoints/food_1"
    assert keys["data.root"] == "/opt/ml/input/data/data-root"
    (channel,) = request["InputDataConfig"]
    assert channel["ChannelName"] == "data-root"
    assert channel["DataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/food/"


def test_the_profiler_is_configured_as_documented(food, command, refused, tmp_path):
    """`validate` has compared it with botocore's model; the account is that of the page
    for the image's region.
    """
    plain = dry(command, food, *G5)["CreateTrainingJob"]
    assert not {"ProfilerConfig", "ProfilerRuleConfigurations"} & plain.keys()
    request = dry(command, food, *G5, "--profiler")["CreateTrainingJob"]
    shape = (
        Session()
        .get_service_model("sagemaker")
        .operation_model("CreateTrainingJob")
        .input_shape
    )
    report = ParamValidator().validate(request, shape)
    assert not report.has_errors(), report.generate_report()
    assert request["ProfilerConfig"] == {
        "S3OutputPath": f"{OUTPUT}/profiler",
        "ProfilingIntervalInMilliseconds": 1000,
    }
    (rule,) = request["ProfilerRuleConfigurations"]
    assert rule["RuleParameters"] == {"rule_to_invoke": "ProfilerReport"}
    host, _, name = rule["RuleEvaluatorImage"].partition("/")
    assert (host, name) == (
        "503895931360.dkr.ecr.us-east-1.amazonaws.com",
        "sagemaker-debugger-rules:latest",
    )

    extra = tmp_path / "extra.json"
    extra.write_text('{"ProfilerConfig": {"ProfilingIntervalInMilliseconds": 300}}')
    options = ("launch", food, *G5, "--profiler", *GIVEN, "--dry-run")
    assert "ProfilingIntervalInMilliseconds: is 300. One of 100, 200" in refused(
        *options, "--extra", extra
    )
    assert refused(*options, "--image", "kd:1").startswith(
        "--profiler: cannot read a region"
    )
    assert "no image of the rules in 'xx-north-9'" in refused(
        *options, "--image", IMAGE.replace("us-east-1", "xx-north-9")
    )


def test_a_trial_on_this_machine_takes_no_option_of_a_job(
    food, refused, command, tmp_path
):
    """All but two were ignored in silence."""
    local = ("launch", food, "--local", "dnn=1", "--dry-run")
    for words in (
        *(
            ["--instance", "ml.g5.xlarge"],
            ["--count", "2"],
            ["--data-group", "ml.c5.large:2"],
            ["--spot"],
        ),
        *(
            ["--hours", "2"],
            ["--volume", "50"],
            ["--view-ms", "3"],
            ["--images-per-second", "9"],
            ["--profiler"],
        ),
        *(
            ["--extra", tmp_path / "extra.json"],
            ["--no-follow"],
            *zip(GIVEN[::2], GIVEN[1::2], strict=True),
        ),
    ):
        assert refused(*local, *words).startswith(
            f"kd-launch: {words[0]}: for jobs on SageMaker, not for --local. "
        )
    message = refused(*local, "--spot", "--count", "2")
    assert message.startswith("kd-launch: --count, --spot: for jobs on SageMaker")
    assert "the configuration is valid" in command(*local, "--backend", "cpu").out
    assert refused(*local, "--backend", "gpu").startswith("backend.kind: is 'gpu'")


def test_the_plan_of_the_cores_says_whether_they_are_enough(food, command, refused):
    """The numbers of the example: 8 x 1,900 images/s at 3 ms are 45.6 cores."""
    options = ("launch", food, *P4D, *GIVEN, "--dry-run", "--images-per-second", "1900")
    planned = command(*options, "--view-ms", "3")
    assert json.loads(planned.out)["CreateTrainingJob"]
    (line,) = planned.err.splitlines()
    assert "8 x 1,900 images/s need 46 cores at 3 ms" in line
    assert "has 48 (96 vCPUs): enough" in line
    slow = command(*options, "--view-ms", "6.64").err
    assert "need 101 cores" in slow
    assert "too few" in slow
    assert "--data-group ml.c5.18xlarge:2 has 120 cores" in slow
    group = command(
        *options, "--view-ms", "6.64", "--data-group", "ml.c5.18xlarge:2"
    ).err
    assert "has 120 cores" in group
    assert "too few: " not in group
    assert "data.store=none" in slow
    assert "data.store=none" not in group
    half = command(
        *options, "--view-ms", "6.64", "--data-group", "ml.c5.18xlarge:1"
    ).err
    assert "that is too few: 84 of 101 cores" in half
    small = ("launch", food, *G5, *GIVEN, "--dry-run", "--view-ms", "3")
    assert "667 images/s for each of 1 accelerators" in command(*small).err
    other_size = command(*small, "--images-per-second", "900").err
    assert "1 x ml.g5.2xlarge has 4 cores for USD 1.52 an hour" in other_size
    assert "48xlarge" not in other_size
    assert refused(*options).startswith("--view-ms: is not given")
    assert "Did you mean" in refused(
        "launch",
        food,
        "--instance",
        "ml.g5.3xlarge",
        *GIVEN,
        "--dry-run",
        "--view-ms",
        "3",
    )
    no_gpu = refused(
        "launch",
        food,
        "--instance",
        "ml.c5.18xlarge",
        *GIVEN,
        "--dry-run",
        "--view-ms",
        "3",
    )
    assert "has no accelerator" in no_gpu
    for text in ("0", "nan", "-1", "many"):
        answer = command(*small[:-1], text)
        assert answer.code == 2
        assert "--view-ms" in answer.err


@pytest.mark.parametrize(
    "group", [(), ("--data-group", "ml.c5.xlarge:1")], ids=["one group", "two groups"]
)
def test_weights_go_to_the_group_that_trains(group, food, command):
    weights = "teacher.checkpoint=s3://bucket/teacher.safetensors"
    request = dry(command, food, "--instance", "ml.g5.xlarge", *group, weights)[
        "CreateTrainingJob"
    ]
    sources = {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]
        for channel in request["InputDataConfig"]
    }
    assert sources["teacher-checkpoint"].get("InstanceGroupNames") == (
        ["dnn"] if group else None
    )
    assert (
        "InstanceGroupNames" not in sources["data-root"]
    )  # without names: all groups, so trainers list and may decode


def test_spot_waits_longer_than_it_runs_and_a_file_is_laid_over(
    food, command, tmp_path
):
    extra = tmp_path / "extra.json"
    extra.write_text('{"Tags": [{"Key": "team", "Value": "vision"}]}')
    request = dry(
        command,
        food,
        "--instance",
        "ml.g5.xlarge",
        "--spot",
        "--hours",
        "2",
        "--extra",
        str(extra),
    )
    stop = request["CreateTrainingJob"]["StoppingCondition"]
    assert request["CreateTrainingJob"]["EnableManagedSpotTraining"]
    assert stop["MaxWaitTimeInSeconds"] > stop["MaxRuntimeInSeconds"] == 7200
    assert request["CreateTrainingJob"]["Tags"][0]["Value"] == "vision"


def test_sections_of_extra_are_joined_to_those_of_the_request(food, command, tmp_path):
    """A warm pool dropped the instance type, a channel of one's own the data, a
    variable Ray's token.
    """
    extra = tmp_path / "extra.json"
    channel = {
        "ChannelName": "mine",
        "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://b/m"}},
    }
    sections = {
        "ResourceConfig": {"KeepAlivePeriodInSeconds": 600},
        "Environment": {"MINE": "1"},
    }
    extra.write_text(json.dumps({**sections, "InputDataConfig": [channel]}))
    options = (food, "--instance", "ml.g5.xlarge", "--extra", str(extra))
    request = dry(command, *options)["CreateTrainingJob"]
    resources = {
        "InstanceType": "ml.g5.xlarge",
        "InstanceCount": 1,
        "VolumeSizeInGB": 100,
    }
    assert request["ResourceConfig"] == {**resources, "KeepAlivePeriodInSeconds": 600}
    assert [
        each_channel["ChannelName"] for each_channel in request["InputDataConfig"]
    ] == [
        "data-root",
        "mine",
    ]
    del sections["ResourceConfig"]  # a warm pool has no groups
    extra.write_text(json.dumps(sections))
    request = dry(command, *options, "--data-group", "ml.c5.xlarge:1")[
        "CreateTrainingJob"
    ]
    assert request["Environment"].keys() == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "MINE"}


def test_shards_and_weights_become_channels(food):
    keys = {
        "run.name": "a",
        "data.train": "s3://b/shards/train-{0..9}.tar",
        "teacher.checkpoint": "s3://b/teacher/model.safetensors",
        "student.checkpoint": "s3://b/student",
    }
    request = requests.training_request(
        requests.Job(
            name="a-1",
            keys=keys,
            image=IMAGE,
            role=ROLE,
            output=OUTPUT,
            instance="ml.g5.xlarge",
        )
    )
    requests.validate("CreateTrainingJob", request)
    sources = {
        c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"]
        for c in request["InputDataConfig"]
    }
    assert sources == {
        "data-train": "s3://b/shards/",
        "teacher-checkpoint": "s3://b/teacher/model.safetensors",
        "student-checkpoint": "s3://b/student/",
    }
    job_keys = request["HyperParameters"]
    assert job_keys["data.train"] == "/opt/ml/input/data/data-train/train-{0..9}.tar"
    assert (
        job_keys["teacher.checkpoint"]
        == "/opt/ml/input/data/teacher-checkpoint/model.safetensors"
    )
    assert job_keys["student.checkpoint"] == "/opt/ml/input/data/student-checkpoint"


@pytest.mark.parametrize(
    ("options", "config_path", "words"),
    [
        (("--instance", "ml.p4d.24xlrge"), "InstanceType", "ml.p4d.24xlarge"),
        (("data.root=photos", "--instance", "ml.g5.xlarge"), "data.root", "s3://"),
        (("data.rot=photos", "--instance", "ml.g5.xlarge"), "data.rot", "root"),
        (
            ("--instance", "ml.g5.xlarge", "--role", "arn-of-a-role-of-mine"),
            "RoleArn",
            "arn:",
        ),
        (("--instance", ""), "--instance", "Give it"),
        (("--instance", "ml.g5.xlarge", "--backend", "cudda"), "backend.kind", "cuda"),
        (("--instance", "ml.g5.xlarge", "--output", "folder"), "--output", "s3://"),
        (
            ("--instance", "ml.g5.xlarge", "--hours", "1e-9"),
            "MaxRuntimeInSeconds",
            "min value: 1",
        ),
        (("--instance", "ml.g5.xlarge", "--hours", "nan"), "--hours", "at most 672"),
        (("--instance", "ml.g5.xlarge", "--hours", "1e9"), "--hours", "at most 672"),
        (
            ("--instance", "ml.trn1.32xlarge", "--backend", "cuda"),
            "backend.kind",
            "ml.p*, ml.g*",
        ),
        (
            ("--instance", "ml.c5.xlarge", "backend.kind=cuda"),
            "backend.kind",
            "does not run on ml.c5.xlarge",
        ),
        (
            ("--instance", "ml.g5.xlarge", "--backend", "smddp"),
            "backend.kind",
            "ml.p4d.*",
        ),
        (
            ("--instance", "ml.p4d.24xlarge", "--backend", "xla"),
            "backend.kind",
            "ml.trn*",
        ),
        (
            ("--instance", "ml.p4d.24xlarge", "teacher.precision=int8"),
            "teacher.precision",
            "cuda",
        ),
        (
            ("--instance", "ml.g5.xlarge", "data.loader=ray"),
            "data.loader",
            "--data-group",
        ),
        (
            ("--instance", "ml.g5.xlarge", *LISTS),
            "data.train_list",
            "outside of data.root",
        ),
        (
            ("--instance", "ml.g5.xlarge", *LISTS, "data.train_list=/meta/t.txt"),
            "data.train_list",
            "this machine",
        ),
        (
            ("--instance", "ml.g5.xlarge", "teacher.model=./runs/a/export"),
            "teacher.model",
            "this machine",
        ),
        (
            ("--instance", "ml.g5.xlarge", "teacher.model=local-dir:runs"),
            "teacher.model",
            "this machine",
        ),
        (
            (
                "--instance",
                "ml.g5.xlarge",
                "teacher.kind=onnx",
                "teacher.classes=c.txt",
            ),
            "teacher.classes",
            "s3://",
        ),
        (
            ("--instance", "ml.g5.xlarge", "teacher.also=[{model: a, checkpoint: b}]"),
            "teacher.also.0.checkpoint",
            "s3",
        ),
    ],
)
def test_a_wrong_request_is_one_line_and_is_not_sent(
    options, config_path, words, food, refused
):
    line = refused("launch", food, *GIVEN, *options)
    assert config_path in line.partition(" ")[0] or config_path in line
    assert words in line


WARM = {"KeepAlivePeriodInSeconds": 600}


@pytest.mark.parametrize(
    ("options", "extra", "config_path", "words"),
    [
        (
            ("--spot",),
            {"StoppingCondition": {"MaxWaitTimeInSeconds": 60}},
            "MaxWaitTimeInSeconds",
            "At least 86400",
        ),
        (
            (),
            {"StoppingCondition": {"MaxWaitTimeInSeconds": 90000}},
            "MaxWaitTimeInSeconds",
            "Add --spot",
        ),
        (("--spot",), {"ResourceConfig": WARM}, "KeepAlive", "a spot job"),
        (
            ("--data-group", "ml.c5.xlarge:1"),
            {"ResourceConfig": WARM},
            "KeepAlive",
            "instance groups",
        ),
    ],
    ids=[
        "spot waits too short",
        "waits without spot",
        "warm and spot",
        "warm and groups",
    ],
)
def test_requests_against_aws_limits_are_not_sent(
    options, extra, config_path, words, food, tmp_path, refused
):
    file = tmp_path / "extra.json"
    file.write_text(json.dumps(extra))
    arguments = (
        food,
        "--instance",
        "ml.g5.xlarge",
        "--extra",
        str(file),
        *options,
        *GIVEN,
    )
    line = refused("launch", *arguments, "--dry-run")
    assert config_path in line
    assert words in line


@pytest.mark.parametrize(
    ("argv", "config_path", "words"),
    [
        (("deploy", "--instance", "ml.inf2.xlarge"), "--instance", "accelerator"),
        (("deploy", "--instance", "ml.g5.xlarge"), "--instance", "ml.c7i.xlarge"),
        (
            ("transform", "s3://b/in", "--instance", "ml.g5.xlarge"),
            "--instance",
            "accelerator",
        ),
        (
            ("transform", "s3://b/in", "--instance", "ml.c5.xlarge", "--at-once", "17"),
            "--at-once",
            "At most 16",
        ),
        (
            (
                "transform",
                "s3://b/in",
                "--instance",
                "ml.c5.xlarge",
                "--to",
                "s3://b/in/",
            ),
            "--to",
            "outside of IMAGES",
        ),
        (
            (
                "transform",
                "s3://b/in",
                "--instance",
                "ml.c5.xlarge",
                "--to",
                "s3://b/in/out",
            ),
            "--to",
            "first one's",
        ),
    ],
)
def test_requests_that_waste_a_host_or_reread_outputs_are_not_sent(
    argv, config_path, words, exported, refused
):
    line = refused("launch", argv[0], exported, *argv[1:], *GIVEN, "--dry-run")
    assert line.startswith(f"{config_path}: ")
    assert words in line


def test_the_shipped_lists_of_food101_need_a_channel_of_their_own(command):
    options = ("--instance", "ml.p4d.24xlarge", *GIVEN, "--dry-run")
    moved = (
        "data.root=s3://b/food-101/images",
        "data.val_list=s3://b/food-101/meta/test.txt",
    )
    answer = command("launch", "vit_food101", *moved, *options)
    assert (answer.code, len(answer.err.splitlines())) == (2, 1)
    assert "data.train_list: '../meta/train.txt' is outside of data.root" in answer.err
    answer = command(
        "launch",
        "vit_food101",
        *moved,
        "data.train_list=s3://b/food-101/meta/train.txt",
        *options,
    )
    keys = json.loads(answer.out)["CreateTrainingJob"]["HyperParameters"]
    assert keys["data.train_list"] == "/opt/ml/input/data/data-train-list/train.txt"


def test_weights_of_further_teachers_become_channels(food, command):
    teachers = (
        "teacher.also=[{model: resnet10t, checkpoint: 's3://b/weights/r.safetensors'}]"
    )
    request = dry(command, food, "--instance", "ml.g5.xlarge", teachers)[
        "CreateTrainingJob"
    ]
    keys = request["HyperParameters"]
    assert list(keys) == sorted(keys)
    received = config.load(
        {}, [f"{key}={text}" for key, text in keys.items()], here=False
    )
    assert (
        received.teacher.also[0].checkpoint
        == "/opt/ml/input/data/teacher-also-0-checkpoint/r.safetensors"
    )
    assert "teacher-also-0-checkpoint" in [
        channel["ChannelName"] for channel in request["InputDataConfig"]
    ]


def test_every_key_whose_text_speaks_of_files_is_declared_as_one_or_known_not_to_be():
    """The check's list of keys comes from the schema: a new key that names files must
    say so.
    """
    written = {"run.name", "run.folder", "data.copies", "teacher.cache.path"}
    written |= {"teacher.fit.folder"}
    inside = {
        "data.train_split",
        "data.val_split",
        "data.test_split",
        "data.unlabelled",
        "data.ending",
        "teacher.license",
        "teacher.also[].license",
    }
    inside |= {
        "data.image_keys",
        "teacher.weights",
        "teacher.also[].weights",
        "student.weights",
    }
    inside |= {
        "data.image_key",
        "data.label_key",
        "data.label_field",
    }  # names inside a folder or a shard
    inside |= {"data.group"}  # a pattern of paths
    rendered = {"data.root [food_mini]"}
    texts = {}
    for key, allowed, _, meaning in explain():
        kind = re.match(r"\[kind: (\w+)\]", meaning)
        if allowed == "Allowed: text" and re.search(
            r"(?i)\b(file|folder|path|shards)s?\b", meaning
        ):
            texts[key + (f" [{kind[1]}]" if kind else "")] = meaning
    declared = set()
    for cls, config_path in _sections():
        declared |= {
            f"{config_path}{name}"
            for name, field in fields_of(cls).items()
            if "files" in declaration(field)
        }
    missing = {
        key for key in texts if key.partition(" ")[0] not in declared | written | inside
    } - rendered
    assert missing == set()


def _sections():
    """Yield the types that hold keys of files, with their place."""
    schema = config.Config
    for name, folder in (
        ("data", "datasets"),
        ("teacher", "networks"),
        ("student", "networks"),
    ):
        for kind in registry.names(folder):
            yield registry.options_type(folder, kind, name), f"{name}."
            yield registry.options_type(folder, kind, name), f"{name}.also[]."
    for name in ("data", "teacher", "student"):
        yield get_type_hints(schema)[name], f"{name}."
    yield Member, "teacher.also[]."


def test_too_long_and_too_many_values_are_found():
    job = requests.Job(
        name="a",
        keys={"run.name": "a"},
        image=IMAGE,
        role=ROLE,
        output=OUTPUT,
        instance="ml.g5.xlarge",
    )
    request = requests.training_request(job)
    request["HyperParameters"] |= {f"key{i}": "x" * 2501 for i in range(100)}
    with pytest.raises(ConfigErrors) as caught:
        requests.validate("CreateTrainingJob", request)
    assert "At most 100" in str(caught.value)
    assert "At most 2500" in str(caught.value)


def read_by_cloudwatch(log: str, run: str) -> dict[str, list[float]]:
    """Return what the definitions of a job read in a log."""
    return {
        definition["Name"]: [
            float(match[1])
            for line in log.splitlines()
            if (match := re.search(definition["Regex"], line))
        ]
        for definition in metric_definitions(run)
    }


def test_the_metrics_are_those_of_a_real_run(written, command, inside):
    """With a fit of the teacher and labels alone, whose lines are no metrics of the
    run.
    """
    fit = {
        "model": "vit_tiny_patch16_224",
        "checkpoint": "",
        "kind": "timm",
        "fit": {"steps": 2},
        "min_accuracy": 0.0,
    }
    path = written(
        run={"epochs": 2, "baseline": True, "every": {"log": 1}}, teacher=fit
    )
    answer = command("train", path)
    assert answer.code == 0, answer
    assert "labels only) | step" in answer.out
    assert "teacher | step" in answer.out
    metrics = read_by_cloudwatch(answer.out, "tiny")
    folder = RunDir(Path(config.load(path).run.folder) / "tiny")
    train = folder.metrics("train")
    val = folder.metrics("val")
    units = {"loss": 0.0006, "images_per_second": 0.51, "step_ms": 0.051}
    for key, unit in units.items():
        assert metrics[f"train:{key}"] == pytest.approx(
            [row[key] for row in train], abs=unit
        ), key
    assert metrics["train:lr"] == pytest.approx([row["lr"] for row in train], rel=0.06)
    assert metrics["train:data_wait_percent"] == pytest.approx(
        [100 * row["data_wait"] for row in train], abs=0.06
    )
    for name, key in (
        ("accuracy", "accuracy"),
        ("teacher_accuracy", "teacher_accuracy"),
        ("agreement", "agreement"),
    ):
        assert metrics[f"val:{name}_percent"] == pytest.approx(
            [100 * row[key] for row in val], abs=0.06
        ), key
    unread = {name for name, values in metrics.items() if not values}
    assert unread == {
        "val:map_percent",
        "val:nearest_neighbours_percent",
        "val:agreement_cosine",
    }
    (steps,) = {
        line.count(" | step ")
        for line in answer.out.splitlines()
        if line.startswith("tiny | step")
    }
    assert steps == 1


@pytest.mark.parametrize(
    ("scores", "row", "expected"),
    [
        (LABEL_SETS, {"map": 0.75, "f1_macro": 0.5}, {"val:map_percent": [75]}),
        (
            EMBEDDING,
            {"knn": 0.5, "teacher_knn": 0.75, "agreement": 0.9125},
            {
                "val:nearest_neighbours_percent": [50],
                "val:teacher_accuracy_percent": [75],
            }
            | {"val:agreement_cosine": [0.9125]},
        ),
    ],
    ids=["label sets", "embedding"],
)
def test_the_metrics_of_other_tasks_are_read(scores, row, expected, capfd):
    console = Console("food", scores=scores)
    state = State(step=3, epoch=0)
    console.step(state, 0.1)
    console.log("val", state, row)
    metrics = read_by_cloudwatch(capfd.readouterr().out, "food")
    assert {name: values for name, values in metrics.items() if values} == expected


def test_a_job_is_created_and_its_log_followed(aws, food, command, monkeypatch):
    logs = aws("logs")
    logs.create_log_group(logGroupName=sending.LOGS)
    monkeypatch.setattr("kd.cli.launch._unique_name", lambda name: "food-1")
    for host in (1, 2):
        logs.create_log_stream(
            logGroupName=sending.LOGS, logStreamName=f"food-1/algo-{host}"
        )
        events = [
            {
                "timestamp": int(1000 * time.time()) + i,
                "message": f"host {host} line {i}",
            }
            for i in range(3)
        ]
        logs.put_log_events(
            logGroupName=sending.LOGS,
            logStreamName=f"food-1/algo-{host}",
            logEvents=events,
        )
    answer = command("launch", food, "--instance", "ml.g5.xlarge", "--spot", *GIVEN)
    assert answer.code == 0, answer
    for host in (1, 2):
        assert re.findall(rf"host {host} line (\d)", answer.out) == ["0", "1", "2"]
    job = aws("sagemaker").describe_training_job(TrainingJobName="food-1")
    assert job["HyperParameters"]["data.root"] == "/opt/ml/input/data/data-root"
    assert job["CheckpointConfig"]["S3Uri"] == "s3://bucket/kd/checkpoints/food_1"


def endpoint_answers(aws, body: str) -> None:
    """Let moto's endpoints answer this: it computes nothing."""
    url = f"{aws('sagemaker').meta.endpoint_url}/moto-api/static/sagemaker/endpoint-results"
    results = json.dumps(
        {
            "results": [{"Body": body, "ContentType": "application/json"}],
            "region": "us-east-1",
        }
    )
    request = urllib.request.Request(
        url, results.encode(), {"content-type": "application/json"}
    )
    urllib.request.urlopen(request).close()


def test_an_export_is_deployed_and_queried(aws, exported, command):
    endpoint_answers(aws, '{"predictions": [{"label": "fig", "score": 0.9}]}')
    options = (exported, "--instance", "ml.c5.xlarge", "--name", "fruit", *GIVEN)
    answer = command("launch", "deploy", *options)
    assert answer.code == 0, answer
    assert "a grey image is 'fig'" in answer.out
    sagemaker = aws("sagemaker")
    assert (
        sagemaker.describe_endpoint(EndpointName="fruit")["EndpointStatus"]
        == "InService"
    )
    model = sagemaker.describe_model(ModelName="fruit")["PrimaryContainer"][
        "ModelDataUrl"
    ]
    assert model == "s3://bucket/kd/models/fruit/model.tar.gz"
    body = (
        aws("s3")
        .get_object(Bucket="bucket", Key="kd/models/fruit/model.tar.gz")["Body"]
        .read()
    )
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        assert {"model.onnx", "manifest.json", "config.json"} <= set(archive.getnames())


@pytest.mark.parametrize("argv", [("deploy",), ("transform", "s3://bucket/in")])
def test_a_graph_that_the_image_cannot_run_is_refused(
    argv, exported, refused, tmp_path
):
    """`kd-export --formats executorch --accept` may choose model.pte, and ExecuTorch
    needs torch.
    """
    folder = tmp_path / "export"
    shutil.copytree(exported, folder)
    shutil.copy(folder / "model.onnx", folder / "model.pte")
    manifest = json.loads((folder / "manifest.json").read_text())
    for key in ("files", "self_check"):
        manifest[key]["model.pte"] = manifest[key]["model.onnx"]
    manifest["pick"] = "model.pte"
    (folder / "manifest.json").write_text(
        json.dumps(manifest | {"checksum": checksum(manifest)})
    )
    line = refused(
        "launch",
        argv[0],
        folder,
        *argv[1:],
        "--instance",
        "ml.c5.xlarge",
        *GIVEN,
        "--dry-run",
    )
    assert line.startswith("EXPORT: ")
    assert "'model.pte' needs executorch" in line
    assert "onnxruntime or openvino" in line


def test_an_endpoint_without_a_response_is_named(aws, exported, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    arguments = {
        "image": IMAGE,
        "role": ROLE,
        "model": "s3://bucket/m.tar.gz",
        "instance": "ml.c5.large",
    }
    hosting = requests.Hosting(name="mute", **arguments)
    with pytest.raises(RunError, match="delete-endpoint --endpoint-name mute"):
        sending.deploy(requests.hosting_requests(hosting), exported, ("fig",))


@pytest.mark.parametrize(
    ("subcommand", "options", "message"),
    [
        ("deploy", (), "delete-endpoint --endpoint-name fruit"),
        ("transform", ("s3://bucket/in",), "stop-transform-job"),
    ],
)
def test_ctrl_c_names_what_aws_goes_on_with(
    aws, exported, command, monkeypatch, subcommand, options, message
):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(sending, "_wait", interrupted)
    answer = command(
        "launch",
        subcommand,
        exported,
        *options,
        "--instance",
        "ml.c5.xlarge",
        "--name",
        "fruit",
        *GIVEN,
    )
    assert (answer.code, answer.err) == (130, "interrupted\n")
    assert "fruit goes on" in answer.out
    assert message in answer.out


def test_a_refusal_by_aws_is_a_one_line_error(aws, exported, refused):
    options = (
        exported,
        "--instance",
        "ml.c5.xlarge",
        *GIVEN,
        "--output",
        "s3://another-bucket/kd",
    )
    assert "NoSuchBucket" in refused("launch", "deploy", *options)


def test_an_endpoint_with_a_wrong_response_is_named(aws, exported):
    endpoint_answers(aws, '{"predictions": []}')
    hosting = requests.Hosting(
        name="odd",
        image=IMAGE,
        role=ROLE,
        model="s3://bucket/m.tar.gz",
        instance="ml.c5.large",
    )
    with pytest.raises(RunError, match="delete-endpoint --endpoint-name odd"):
        sending.deploy(requests.hosting_requests(hosting), exported, ("fig",))


def test_a_batch_transform_is_sent(aws, exported, command):
    options = ("--instance", "ml.c5.xlarge", "--name", "all-fruit", *GIVEN)
    answer = command("launch", "transform", exported, "s3://bucket/images", *options)
    assert answer.code == 0, answer
    assert "results: s3://bucket/kd/transform/all-fruit" in answer.out
    job = aws("sagemaker").describe_transform_job(TransformJobName="all-fruit")
    assert job["TransformInput"]["ContentType"] == "application/x-image"
    assert job["TransformJobStatus"] == "Completed"

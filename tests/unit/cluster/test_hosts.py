"""What a host of a SageMaker job learns about itself, and the processes that it finds
again.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kd.cluster.group import Node, command, empty_config, num_decoders
from kd.cluster.hosts import (
    Hosts,
    LocalJob,
    end_marked,
    hyperparameters,
    marked_processes,
    marks,
    num_trainers,
    read_hosts,
)
from kd.core.errors import BackendError

GROUPS = [
    {
        "instance_group_name": "data",
        "instance_type": "ml.c5.xlarge",
        "hosts": ["algo-1", "algo-3"],
    },
    {
        "instance_group_name": "dnn",
        "instance_type": "ml.p4d.24xlarge",
        "hosts": ["algo-2", "algo-4"],
    },
]


def config(current_host: str, name: str = "current_group_name", groups=GROUPS) -> dict:
    hosts = sorted(host for group in groups for host in group["hosts"])
    return {
        "current_host": current_host,
        name: "data",
        "hosts": hosts,
        "instance_groups": groups,
    }


def variables(current_host: str) -> dict[str, str]:
    groups_by_name = {group["instance_group_name"]: group for group in GROUPS}
    hosts = json.dumps([f"algo-{number}" for number in range(1, 5)])
    return {
        "SM_CURRENT_HOST": current_host,
        "SM_HOSTS": hosts,
        "SM_INSTANCE_GROUPS_DICT": json.dumps(groups_by_name),
    }


@pytest.mark.parametrize("current_host", ["algo-1", "algo-2"])
@pytest.mark.parametrize("name", ["current_group_name", "current_instance_group"])
def test_variables_and_the_file_tell_the_same(tmp_path, current_host, name):
    file = tmp_path / "resourceconfig.json"
    file.write_text(json.dumps(config(current_host, name)))
    expected = Hosts(current_host, ("algo-2", "algo-4"), ("algo-1", "algo-3"))
    assert (
        read_hosts({}, file)
        == read_hosts(variables(current_host), tmp_path / "absent")
        == expected
    )
    assert expected.first == "algo-2"


def test_a_job_may_have_one_group_and_there_may_be_no_job(tmp_path):
    file = tmp_path / "resourceconfig.json"
    file.write_text(
        json.dumps({"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]})
    )
    assert read_hosts({}, file) == Hosts("algo-2", ("algo-1", "algo-2"), ())
    assert read_hosts({}, tmp_path / "absent") == Hosts("localhost", ("localhost",), ())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "JSONDecodeError"),
        (json.dumps(config("algo-9")), "is in none"),
        (json.dumps(config("algo-1", groups=GROUPS[:1])), "has no trainers"),
    ],
)
def test_a_description_that_makes_no_sense_is_one_line(tmp_path, content, message):
    file = tmp_path / "resourceconfig.json"
    file.write_text(content)
    with pytest.raises(BackendError, match=message):
        read_hosts({}, file)


def test_hyperparameters_become_overrides(tmp_path):
    file = tmp_path / "hyperparameters.json"
    file.write_text(
        json.dumps(
            {"run.name": "a", "losses": "[{kind: ce}]", "sagemaker_program": "x"}
        )
    )
    assert hyperparameters(file) == ["losses=[{kind: ce}]", "run.name=a"]
    with pytest.raises(BackendError, match=r"^train: .* cannot be read"):
        hyperparameters(tmp_path / "absent")


def test_one_process_an_accelerator_and_decoders_for_the_cores_that_are_left(
    monkeypatch,
):
    monkeypatch.setattr("kd.cluster.group.cores", lambda: 96)
    assert [
        num_trainers(env)
        for env in ({"SM_NUM_GPUS": "8"}, {"SM_NUM_GPUS": "0", "SM_NUM_NEURONS": "32"})
    ] == [8, 32]
    hosts = read_hosts(variables("algo-2"))
    assert num_decoders(hosts, {"SM_NUM_GPUS": "8"}) == 88
    assert num_decoders(read_hosts(variables("algo-1")), {"SM_NUM_GPUS": "0"}) == 96
    assert num_decoders(hosts, {"KD_DECODERS": "5"}) == 5


def test_torchrun_runs_on_the_trainers_alone(monkeypatch):
    monkeypatch.setenv("KD_PROCESSES", "8")
    words = command(read_hosts(variables("algo-4")), ["a.yaml"])
    options = dict(zip(words[3:13:2], words[4:13:2], strict=True))
    assert words[1:3] == ["-m", "torch.distributed.run"]
    assert (options["--nnodes"], options["--node-rank"]) == ("2", "1")
    assert (options["--nproc-per-node"], options["--master-addr"]) == ("8", "algo-2")
    assert words[-4:] == ["-m", "kd.cli", "train", "a.yaml"]
    monkeypatch.setenv("KD_PROCESSES", "1")
    assert command(Hosts("a", ("a",), ("b",)), ["a.yaml"])[1:] == [
        "-m",
        "kd.cli",
        "train",
        "a.yaml",
    ]


@pytest.mark.parametrize("kept_mark", ["KD_TEST", "KD_TEST_AGAIN"])
def test_marked_processes_are_found_and_ended_although_they_are_daemons(kept_mark):
    """Although one of the two variables is gone, too."""
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    script = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script += (
        "if os.fork() == 0:\n    os.setsid()\n    print('up', flush=True)\n   "
        " time.sleep(60)\n"
    )
    environ = {**os.environ, kept_mark: marks(mark, "KD_TEST")[kept_mark]}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        (daemon,) = set(marked_processes(mark, "KD_TEST")) - {process.pid}
        os.kill(daemon, signal.SIGSTOP)
        assert end_marked(mark, "KD_TEST", grace=0.2) >= 1
        assert list(marked_processes(mark, "KD_TEST")) == []


class Shells(LocalJob):
    """Each host runs its own line of a shell in place of kd."""

    def start(self, host: str) -> None:
        self.processes[host] = subprocess.Popen(
            ["sh", "-c", self.argv[len(self.processes)]]
        )


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (("exit 0", "exit 0", "exit 5"), 0),
        (("exit 0", "kill -9 $$", "exit 0"), -9),
        (("exit 1", "exit 3", "exit 0"), 1),
    ],
)
def test_a_local_job_ends_as_its_first_trainer_that_failed(lines, code):
    """Also as one that the kernel killed for its memory; a host of data does
    not count.
    """
    assert Shells({"dnn": 2, "data": 1}, lines).wait() == code


def test_a_host_may_start_before_the_name_of_the_first_one_is_known():
    node = Node(Hosts("algo-2", ("not-yet.invalid",), ("algo-2",)), "mark")
    assert (node.head, node.folder) == (False, "")


def test_the_empty_configuration_is_in_a_private_folder(tmp_path, monkeypatch):
    """Its name in the temporary folder was known: a link of that name was written
    through.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "kd-empty.yaml").symlink_to(victim)
    first = empty_config()
    second = empty_config()
    assert victim.read_text() == "precious"
    assert first != second
    assert first.read_text() == "{}\n"
    assert first.parent.stat().st_mode & 0o077 == 0

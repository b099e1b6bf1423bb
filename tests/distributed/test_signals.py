"""SIGTERM and SIGINT: a checkpoint, exit code 75 on every rank, and the same command
ends with the same bits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from pieces import Trained, fitted, without_clocks
from ranks import HERE, STEPS, environment, start
from test_resume import same_bits

OURS = (
    "data.kind=outside.signalling",
    "optimizer.ema_decay=0.9",
    f"run.every.checkpoint={STEPS}",
)
SLOW = {"KD_SLOW": "0.02"}


def newest(run: Trained) -> int:
    return max(
        int(folder.name.removeprefix("step_"))
        for folder in (run.folder / "checkpoints").glob("step_*")
    )


def rows(run: Trained, kind: str) -> list[dict]:
    return without_clocks(run.rows(kind))


# the gate decodes an epoch before, the teacher's checks two validation splits, each
# examination two images
@pytest.mark.parametrize(
    ("ranks", "sent", "rank", "step"),
    [
        pytest.param(1, "SIGTERM:train:120", "", None, id="one rank, in a step"),
        pytest.param(1, "SIGINT:train:120", "", None, id="one rank, Ctrl-C"),
        pytest.param(
            1, "SIGTERM:val:47", "", STEPS, id="one rank, in the last evaluation"
        ),
        pytest.param(2, "SIGTERM:train:60", "", None, id="two ranks, in a step"),
        pytest.param(2, "SIGTERM:train:60", "1", None, id="two ranks, one is told"),
        pytest.param(
            2, "SIGTERM:val:28", "", STEPS, id="two ranks, in the last evaluation"
        ),
    ],
)
@pytest.mark.slow
def test_a_signal_leaves_a_checkpoint(train, plain, ranks, sent, rank, step, request):
    name = f"signalled-{request.node.callspec.id.replace(' ', '-')}"
    overrides = (
        () if ranks == 1 else ("data.eval_batch=2",)
    )  # more batches than one, so that the evaluation is given up
    slow = SLOW if ranks > 1 else {}  # two ranks speak of it once a second
    stopped = train(
        name,
        ranks,
        *OURS,
        *overrides,
        env={"KD_SIGNAL": sent, "KD_SIGNAL_RANK": rank, **slow},
    )
    assert stopped.world.codes == [75] * ranks, stopped.world.logs
    at = newest(stopped)
    assert at == step or (step is None and 0 < at < STEPS)
    assert (
        len(
            {
                log.splitlines()[-1].partition("stopped after step ")[2].split()[0]
                for log in stopped.world.logs
            }
        )
        == 1
    )
    assert f"stopped after step {at} and wrote a checkpoint" in stopped.world.logs[0]
    assert rows(stopped, "val") == []
    resumed = train(name, ranks, *OURS, *overrides)
    resumed.world.ended_well()
    undisturbed = plain(ranks, *OURS, *overrides)
    assert same_bits(resumed.checkpoint(), undisturbed.checkpoint())
    assert rows(resumed, "val") == rows(undisturbed, "val")
    assert rows(resumed, "train") == rows(undisturbed, "train")  # one a step


@pytest.mark.parametrize(
    ("ranks", "sent"),
    [(1, "SIGTERM:train:50"), (1, "SIGTERM:val:20"), (2, "SIGTERM:train:40")],
)
@pytest.mark.slow
def test_a_signal_in_the_fit_of_the_teacher_leaves_a_checkpoint(
    changed_file, config_file, tmp_path, ranks, sent
):
    short = {**yaml.safe_load(config_file.read_text())["run"], "steps": 2}
    file = changed_file(teacher=fitted(tmp_path / "signalled"), run=short)

    def run(folder: str, env: dict[str, str]):
        argv = [file, "data.kind=outside.signalling", f"run.folder={tmp_path}/{folder}"]
        return start(
            "kd.cli.training:train",
            [*argv, f"teacher.fit.folder={tmp_path}/{folder}"],
            ranks,
            env,
        )

    slow = SLOW if ranks > 1 else {}
    stopped = run("broken", {"KD_SIGNAL": sent, **slow})
    assert stopped.codes == [75] * ranks, stopped.logs
    (teacher,) = (tmp_path / "broken").glob("*-????????????")
    assert "wrote a checkpoint" in stopped.logs[0]
    assert not (teacher / "export").exists()
    run("broken", {}).ended_well()
    run("whole", {}).ended_well()
    (undisturbed,) = (tmp_path / "whole").glob("*-????????????")
    weights = [
        (folder / "export" / "model.safetensors").read_bytes()
        for folder in (teacher, undisturbed)
    ]
    assert weights[0] == weights[1]


def test_a_signal_before_the_first_step_ends_at_once(train):
    stopped = train(
        "early", 1, *OURS, env={"KD_SIGNAL": "SIGTERM:val:1"}
    )  # where the teacher is checked
    assert stopped.world.codes == [75]
    assert (
        stopped.world.logs[0].splitlines()[-1]
        == "stopped by SIGTERM; the same command resumes"
    )
    assert not list((stopped.folder / "checkpoints").glob("step_*"))
    train("early", 1, *OURS).world.ended_well()


def test_a_killed_data_worker_is_one_line(train):
    killed = train(
        "worker",
        1,
        *OURS,
        "data.workers=1",
        "sifter.kind=none",
        env={"KD_SIGNAL": "SIGKILL:train:50"},
    )
    assert killed.world.codes == [2], killed.world.logs[0]
    last = killed.world.logs[0].splitlines()[-1]
    assert last.startswith("data.workers: ")
    assert "worker process" in last
    assert "fewer data.workers" in last
    assert "bug" not in killed.world.logs[0]


def launched(
    argv: list[str], rows_file: Path, send, steps: int = 4, **env: str
) -> tuple[int, str, float]:
    """Start a command in a process group of its own, call `send(process)` after
    `steps`; return how it ended.
    """
    environ = {**environment(), **env}
    environ["PYTHONPATH"] += f":{HERE}"
    log = rows_file.parent.with_suffix(".log")
    with log.open("w") as out:
        process = subprocess.Popen(
            argv, env=environ, stdout=out, stderr=out, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 90
            while process.poll() is None and time.monotonic() < deadline:
                if (
                    rows_file.is_file()
                    and sum(
                        '"train"' in line for line in rows_file.read_text().splitlines()
                    )
                    >= steps
                ):
                    break
                time.sleep(0.02)
            start = time.monotonic()
            send(process)
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return process.returncode, log.read_text(), time.monotonic() - start


@pytest.mark.slow
def test_a_second_signal_ends_at_once(config_file, tmp_path):
    argv = [sys.executable, "-m", "kd.cli", "train", str(config_file), *OURS]
    argv += [f"run.folder={tmp_path}", "run.name=twice"]

    def twice(process):
        process.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        process.send_signal(signal.SIGTERM)

    code, output, seconds = launched(
        argv, tmp_path / "twice" / "metrics.jsonl", twice, 1, KD_SLOW="0.5"
    )  # 6 s a step
    assert code == -signal.SIGTERM, output
    assert "a second signal ends now" in output
    assert seconds < 20


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.slow
def test_a_signal_to_the_whole_group_leaves_the_data_workers_their_work(
    config_file, plain, tmp_path, workers
):
    """`timeout`, Slurm and others send it so. With two threads torch has a pool, which
    a worker starts anew.
    """
    threads = "backend.threads=2"
    argv = [sys.executable, "-m", "kd.cli", "train", str(config_file), *OURS, threads]
    argv += [f"run.folder={tmp_path}", "run.name=group", f"data.workers={workers}"]
    code, output, _ = launched(
        argv, tmp_path / "group" / "metrics.jsonl", to_the_group, KD_SLOW="0.02"
    )
    assert code == 75, output
    assert "wrote a checkpoint" in output
    resumed = start("kd.cli.training:train", argv[4:])
    resumed.ended_well()
    undisturbed = plain(1, *OURS, threads)
    assert same_bits(Trained(tmp_path / "group").checkpoint(), undisturbed.checkpoint())


def to_the_group(process):
    os.killpg(process.pid, signal.SIGTERM)


@pytest.mark.slow
def test_torchrun_passes_a_signal_on(config_file, plain, tmp_path):
    """torchrun sends SIGTERM to the group of each rank, data workers included, and
    kills 30 s later.
    """
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    argv += [
        "-m",
        "kd.cli",
        "train",
        str(config_file),
        *OURS,
        f"run.folder={tmp_path}",
        "run.name=launched",
    ]
    argv += ["data.workers=1"]
    file = tmp_path / "launched" / "metrics.jsonl"
    code, output, seconds = launched(
        argv, file, lambda process: process.terminate(), KD_SLOW="0.05"
    )
    assert code != 0
    assert "[rank 0] stopped after step" in output
    assert "[rank 1] stopped after step" in output
    assert seconds < 25
    assert json.loads(file.read_text().splitlines()[-1])["step"] < STEPS
    resumed = start("kd.cli.training:train", [*argv[9:-1]], 2)
    resumed.ended_well()
    undisturbed = plain(2, *OURS)
    assert same_bits(
        Trained(tmp_path / "launched").checkpoint(), undisturbed.checkpoint()
    )

"""A user without a passwd entry, as OpenShift makes one up: no HOME, nothing that may
be written but one folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kd.cli.command import run_guarded

ROOT = Path(__file__).parents[2]
# The interpreter may lie in a home folder that other users cannot enter: it is mounted
# below a readable one.
ALONE = """
set -e
mount --make-rprivate /
base="$1" scratch="$2"; shift 2
case "$base" in /root/*)
  mkdir -p "$scratch/base"; mount --bind "$base" "$scratch/base"
  mount -t tmpfs tmpfs /root -o mode=755
  mkdir -p "$base"; mount --bind "$scratch/base" "$base"; mount -o remount,ro /root
esac
mount --bind "$scratch" "$scratch"
mount -o remount,bind,ro /
mount -o remount,bind,rw "$scratch"
mount -o remount,ro /dev/shm 2>/dev/null || true
cd /
exec setpriv --reuid 12345 --regid 0 --clear-groups env -u HOME -u USER -u LOGNAME -u USERNAME -u LNAME "$@"
"""


@pytest.fixture(scope="module")
def homeless(tmp_path_factory):
    """Run a command in this way; skip where that cannot be done here."""
    base = tmp_path_factory.getbasetemp()
    scratch = Path(tempfile.mkdtemp(prefix="kd-homeless-"))
    scratch.chmod(0o777)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": ""}

    def run(*argv: object, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [
            "unshare",
            "--mount",
            "bash",
            "-c",
            ALONE,
            "bash",
            sys.base_prefix,
            scratch,
            *argv,
        ]
        return subprocess.run(
            [str(arg) for arg in command],
            capture_output=True,
            text=True,
            env=environment | variables,
            timeout=200,
        )

    base.parent.chmod(0o755)
    code = "import getpass, os; assert os.getuid() == 12345; getpass.getuser()"
    probe = run(sys.executable, "-c", code)
    if "uid not found" not in probe.stderr and "No username set" not in probe.stderr:
        pytest.skip(f"needs root, unshare and setpriv: {probe.stderr.strip()[-200:]}")
    run.scratch = scratch
    yield run
    shutil.rmtree(scratch)


SERVE = """
import threading, time, os, signal, sys
from kd.cli.serving import serve
threading.Timer(4, os.kill, (os.getpid(), signal.SIGTERM)).start()
sys.exit(serve([sys.argv[1], "--port", "0"]))
"""


def test_the_commands_without_torch_run(homeless, exported, photos):
    for path in (exported, photos, *exported.parents, *photos.parents):
        if path.is_relative_to(tempfile.gettempdir()):
            path.chmod(path.stat().st_mode | 0o055)
    served = homeless(sys.executable, "-c", SERVE, exported)
    assert served.returncode == 0, served.stderr
    lines = served.stderr.splitlines()
    assert all(" INFO kd.serve " in line for line in lines), (
        "nothing is said of a folder that cannot be written"
    )
    to = homeless.scratch / "labels.csv"
    process = homeless(
        sys.executable, "-m", "kd.cli", "predict", exported, photos / "val", "--to", to
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert len(to.read_text().splitlines()) == 14
    nowhere = homeless(
        sys.executable,
        "-m",
        "kd.cli",
        "predict",
        exported,
        photos / "val",
        "--to",
        "/labels.csv",
    )
    assert nowhere.returncode == 2
    assert nowhere.stderr.startswith("--to: cannot write '/labels.csv")


@pytest.mark.slow
def test_training_says_what_to_set(homeless, written):
    path = Path(written(run={"folder": str(homeless.scratch / "runs"), "steps": 2}))
    config = homeless.scratch / "tiny.yaml"
    config.write_text(path.read_text())
    trained = homeless(sys.executable, "-m", "kd.cli", "train", config)
    assert trained.returncode == 2
    assert trained.stderr.splitlines()[-1].startswith(
        "TMPDIR: No usable temporary directory found in "
    )


def test_a_machine_without_a_folder_for_temporary_files_is_one_line(monkeypatch, capfd):
    """torch asks for one when it is imported; before, a traceback and "this is a bug in
    kd".
    """

    def command() -> None:
        with (
            monkeypatch.context() as patch
        ):  # pytest's own capturing wants such a folder too
            patch.setattr(tempfile, "tempdir", None)
            patch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
            tempfile.gettempdir()

    assert run_guarded(command) == 2
    expected = (
        "TMPDIR: No usable temporary directory found in ['/nowhere']. Set it to a"
        " folder that you may write.\n"
    )
    assert capfd.readouterr().err == expected


def test_onnxruntime_sends_nothing_to_its_makers(exported, tmp_path):
    """onnxruntime 1.32 keeps an id and a queue of events in the home folder, and sends
    them.
    """
    code = """
import os, sys
from pathlib import Path
import kd
from kd.deploy.serve.model import describe, load
load(describe(Path(sys.argv[1])), 1, 1).warm_up(1)
assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"
"""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key != "ORT_DISABLE_TELEMETRY"
    }
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", code, exported], env=environment, check=True, timeout=60
    )
    assert list(tmp_path.rglob("*")) == []

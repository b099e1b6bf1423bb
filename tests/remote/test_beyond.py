"""docs/scale.md, "Beyond one machine": its programs answer as `kd.load` does in one
process.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kd

ROOT = Path(__file__).parents[2]


def block(beginning: str) -> str:
    """Return the block of the page that begins so."""
    section = (
        (ROOT / "docs/scale.md").read_text().partition("\n## Beyond one machine\n")[2]
    )
    (source,) = (
        text
        for text in re.findall(r"^```\n(.*?)^```$", section, re.M | re.S)
        if text.startswith(beginning)
    )
    return source


@pytest.fixture
def place(exported, photos, tmp_path, monkeypatch) -> Path:
    """The current folder, with what the programs read."""
    (tmp_path / "runs/vit_food").mkdir(parents=True)
    (tmp_path / "runs/vit_food/export").symlink_to(exported)
    (tmp_path / "photos").symlink_to(photos)
    monkeypatch.chdir(tmp_path)
    Path("photos.txt").write_text(
        "".join(f"{path}\n" for path in sorted(Path("photos").rglob("*.jpg")))
    )
    return tmp_path


def test_a_lambda_handler_answers_as_the_model(exported, photos):
    names: dict = {}
    exec(block("import base64, json").replace("/var/task/export", str(exported)), names)
    picture = next((photos / "val/fig").glob("*.jpg"))
    answer = names["handler"](
        {"body": base64.b64encode(picture.read_bytes()).decode()}, None
    )
    expected = kd.load(exported)(picture)
    assert answer["statusCode"] == 200
    assert json.loads(answer["body"]) == {
        "label": expected.label,
        "score": expected.score,
    }
    assert names["handler"]({"body": "aGVsbG8="}, None)["statusCode"] == 400


@pytest.mark.slow
def test_dask_labels_as_the_model(place):
    pytest.importorskip("dask.bag")
    lines = "".join(f"    {line}\n" for line in block("labels = dask.bag").splitlines())
    program = f"""
import dask.bag, kd
from pathlib import Path
paths = sorted(map(str, Path("photos").rglob("*.jpg")))
model = kd.load("runs/vit_food/export")
if __name__ == "__main__":
{lines}
    assert found == model(paths)
    print(len(found))
"""
    (place / "program.py").write_text(program)
    process = subprocess.run(
        [sys.executable, "program.py"],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert process.stdout.strip() == str(len(list(Path("photos").rglob("*.jpg")))), (
        process.stderr
    )


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@pytest.mark.slow
def test_ray_data_killed_and_started_again_ends_well(place):
    """A worker dies in the first start, whose program is killed when some rows are
    written.
    """
    pytest.importorskip("ray.data.checkpoint")
    import pyarrow.parquet as parquet

    died = place / "died"
    dying = f"""
    def __call__(self, batch):
        import os, time
        time.sleep(0.3)
        if not os.path.exists({str(died)!r}):
            open({str(died)!r}, "w").close()
            os._exit(1)
"""
    program = block("from pathlib import Path\nimport kd, ray")
    assert "    def __call__(self, batch):\n" in program
    program = program.replace(
        "import kd, ray\n", "import kd, ray\nray.init(num_cpus=4)\n"
    )  # here are two cores
    (place / "first.py").write_text(
        program.replace("    def __call__(self, batch):\n", dying[1:])
    )
    (place / "program.py").write_text(program)
    begin = time.monotonic()
    log = open(place / "log", "w")  # noqa: SIM115
    first = subprocess.Popen(
        [sys.executable, "first.py"],
        env=environment(),
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        while first.poll() is None and not list(place.glob("labels/*.parquet")):
            assert time.monotonic() - begin < 200, (place / "log").read_text()[-2000:]
            time.sleep(0.1)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        log.close()
    assert died.exists()
    paths = Path("photos.txt").read_text().splitlines()
    before = parquet.read_table("labels").num_rows
    assert 0 < before < len(paths)
    process = subprocess.run(
        [sys.executable, "program.py"],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    rows = parquet.read_table("labels").to_pylist()
    expected = {
        path: answer.label
        for path, answer in zip(
            paths, kd.load("runs/vit_food/export")(paths), strict=True
        )
    }
    assert {row["text"]: row["label"] for row in rows} == expected
    assert len(rows) < len(paths) + before  # what was written is not computed again

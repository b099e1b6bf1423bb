"""A loaded export in a process that was forked from the one that loaded it: gunicorn's
preload, multiprocessing.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kd

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="forks after threads were started"
)
SECONDS = 20.0  # a child that waits for a thread of its parent never ends


@pytest.fixture(scope="module")
def openvino(distilled, once) -> Path:
    pytest.importorskip("openvino")
    from kd.deploy.export.export import ExportOptions, export

    return once(
        "openvino",
        lambda folder: (
            export(distilled, folder / "export", ExportOptions(openvino=True)).folder
        ),
    )


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    "predicts_before", [True, False], ids=["used before", "only loaded"]
)
@pytest.mark.parametrize("file", ["model.onnx", "openvino.xml"])
def test_a_forked_child_predicts_as_its_parent(openvino, file, predicts_before):
    model = kd.load(openvino, file, threads=2)
    picture = np.full((20, 24, 3), 90, np.uint8)
    expected = model(picture) if predicts_before else None
    forked = multiprocessing.get_context("fork")
    mine, theirs = forked.Pipe()
    children = [
        forked.Process(target=lambda: theirs.send(model(picture))) for _ in range(2)
    ]
    try:
        for child in children:
            child.start()
        assert mine.poll(SECONDS), "the child does not answer"
        answers = [mine.recv() for _ in children if mine.poll(SECONDS)]
    finally:
        for child in children:
            child.kill()
            child.join()
    assert answers == [expected or model(picture)] * len(children)
    assert model(picture) == answers[0]  # the parent goes on


CHILD = """
import os, signal, sys
import numpy as np
import kd
model = kd.load(sys.argv[1], sys.argv[2], threads=2)
picture = np.full((20, 24, 3), 90, np.uint8)
model(picture)
child = os.fork()
if not child:
    signal.alarm(20)
    if sys.argv[3] == "asked":
        model(picture)
    del model
    sys.exit(7)  # not os._exit: a worker of a server frees its objects
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("use", ["asked", "not asked"])
@pytest.mark.parametrize("file", ["model.onnx", "openvino.xml"])
def test_a_forked_child_ends(openvino, file, use):
    """Freed in the child, a session of onnxruntime waited for its parent's threads for
    ever.
    """
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(openvino), file, use]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout.strip() == "7", ended.stderr

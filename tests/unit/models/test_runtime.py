"""The frozen forward outside plain torch says what plain torch says, and leaves nothing
behind.
"""

import copy
import shutil
import subprocess
import sys
import tempfile
from functools import cache, partial

import pytest
import torch
from pieces import Asks

from kd.core.errors import ModelError
from kd.core.types import Batch
from kd.models.classifier import Classifier
from kd.models.compiled import compile_forward
from kd.models.live_teacher import LiveTeacher
from kd.models.load_classifier import load
from kd.models.runtimes import Exported, exported
from kd.models.spec import Spec

CLASSES = ("apple", "fig", "pear")
ARGS = {"patch_size": 8, "embed_dim": 96, "depth": 2, "num_heads": 2}
CPU = torch.device("cpu")
ROUNDING = 2e-5
"""Of a logit: sums of a thousand float32 products in another order."""


def model(size: int = 16, **args) -> Classifier:
    torch.manual_seed(0)
    return load(
        Spec("teacher", "vit_tiny_patch16_224", {**ARGS, **args}, CLASSES), size
    )


@cache
def graph() -> bytes:
    return exported(model().eval(), 16)


def batch(count: int = 7, size: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(count)
    image = torch.randint(
        256, (count, 3, size, size), dtype=torch.uint8, generator=generator
    )
    return Batch.of(image, torch.zeros(count, dtype=torch.int64))


def live(
    runtime: str, size: int = 16, precision: str = "fp32", micro_batch: int = 0, **args
) -> LiveTeacher:
    network = model(size, **args)
    make = partial(Exported, size=size, runtime=runtime, precision=precision)
    return LiveTeacher(network, CPU, micro_batch=micro_batch, remake=make)


def has(runtime: str) -> str:
    pytest.importorskip(
        runtime, reason=f"{runtime} is not installed: pip install 'kd[openvino]'"
    )
    return runtime


@pytest.mark.parametrize(
    ("runtime", "size", "args"),
    [
        ("onnxruntime", 16, {}),
        ("onnxruntime", 20, {"img_size": 16}),
        ("openvino", 16, {}),
        ("openvino", 20, {"img_size": 16}),
    ],
)
def test_a_graph_says_what_torch_says(runtime, size, args):
    outside = live(has(runtime), size, **args)
    inside = LiveTeacher(model(size, **args), CPU)
    for count in (1, 7):
        inputs = batch(count, size)
        torch.testing.assert_close(
            outside(inputs).logits, inside(inputs).logits, rtol=0, atol=ROUNDING
        )
    assert outside(inputs).features == {}
    assert outside.images == 15


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_outputs_are_ordinary_float32_tensors(runtime):
    teacher = live(has(runtime), micro_batch=3)
    first = teacher(batch()).logits
    copied = first.clone()
    assert first.dtype == torch.float32
    assert not first.is_inference()
    weight = torch.ones(3, requires_grad=True)
    (first * weight).sum().backward()  # autograd saves the logits for this
    torch.testing.assert_close(weight.grad, first.sum(0))
    teacher(batch(5))
    # the runtime does not write into what it gave away
    assert torch.equal(first, copied)


def test_nothing_is_left_on_the_disk_and_no_weights_in_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    teacher = live("onnxruntime", precision="int8")
    teacher(batch())
    assert list(tmp_path.iterdir()) == []
    assert not list(teacher.model.parameters())
    with pytest.raises(ModelError, match="cannot express"):
        exported(Classifier(Asks(), 3, 0), 16)
    assert list(tmp_path.iterdir()) == []


def test_int8_is_near_and_smaller_and_not_the_same():
    exact = LiveTeacher(model(), CPU)(batch()).logits
    coarse = live("onnxruntime", precision="int8")(batch()).logits
    # 8 bits a product, two blocks deep
    assert 0 < (coarse - exact).abs().max() < 0.3 * exact.std()
    assert len(exported(model().eval(), 16, int8=True)) < 0.5 * len(graph())


def test_openvino_computes_in_bfloat16_where_the_processor_has_it():
    openvino = pytest.importorskip("openvino", reason="pip install 'kd[openvino]'")
    exact = LiveTeacher(model(), CPU)(batch()).logits
    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        with pytest.raises(
            ModelError, match=r"^teacher\.precision: .*no bfloat16 units"
        ):
            live("openvino", precision="bf16")(batch())
        return
    coarse = live("openvino", precision="bf16")(batch()).logits
    assert coarse.dtype == torch.float32
    assert ROUNDING < (coarse - exact).abs().max().item() < 0.05 * exact.std().item()


def test_compiling_is_in_place_and_a_copy_is_plain():
    network = model()
    names = list(network.state_dict())
    assert compile_forward(network) is network
    assert list(network.state_dict()) == names
    assert network._compiled_call_impl is not None
    assert copy.deepcopy(network)._compiled_call_impl is None


SIGNALLED = """
import os, signal, sys
from pathlib import Path
from kd.models.runtimes import has_bf16, openvino_runner

signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
first = openvino_runner(Path(sys.argv[1]))
second = openvino_runner(Path(sys.argv[1]))
has_bf16()
del first  # the stack of this one is what the second one would put back
del second
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_process_that_has_used_openvino_lives_through_signals(tmp_path):
    has("openvino")
    (tmp_path / "model.onnx").write_bytes(graph())
    argv = [sys.executable, "-c", SIGNALLED, str(tmp_path / "model.onnx")]
    completed = subprocess.run(argv, capture_output=True, text=True)
    assert (completed.returncode, completed.stdout) == (0, "handled\n"), (
        completed.stderr
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_it_says_what_torch_says_at_every_size():
    network = model()
    compiled = LiveTeacher(network, CPU, remake=compile_forward)
    plain = LiveTeacher(network, CPU)
    for count in (7, 3, 7):
        torch.testing.assert_close(
            compiled(batch(count)).logits,
            plain(batch(count)).logits,
            rtol=0,
            atol=ROUNDING,
        )
    assert not compiled(batch()).logits.is_inference()

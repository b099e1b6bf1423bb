"""An export of a small student: which files there are, what manifest and card say, and
what is refused.
"""

import contextlib
import json
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch

import kd
from kd.config.schema import LossSection
from kd.core.errors import ConfigError, ModelError, RunError
from kd.deploy.export import graphs
from kd.deploy.export.export import learned_projector, write
from kd.deploy.export.flags import ExportOptions
from kd.deploy.export.package import new_export
from kd.deploy.serve.bench import Latency
from kd.deploy.serve.model import describe, load
from kd.models import runtimes
from kd.parts import registry
from kd.parts.tasks import embedding, single_label

SINGLE, VECTORS = (
    module.build(module.Options()) for module in (single_label, embedding)
)


def files(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_only_requested_graphs_are_written(subject, tmp_path):
    base = subject()
    written = write(base, tmp_path / "export", ExportOptions(pt2=True, int8=True))
    plain = {
        "README.md",
        "config.json",
        "kd.json",
        "manifest.json",
        "model.safetensors",
    }
    assert files(written.folder) == {
        *plain,
        "model.onnx",
        "model.pt2",
        "model.int8.onnx",
        "self_check.npz",
    }
    manifest = json.loads((written.folder / "manifest.json").read_text())
    returned = json.loads(json.dumps(written.manifest))
    assert {
        **returned,
        "files": manifest["files"],
        "checksum": manifest["checksum"],
    } == manifest
    assert (
        set(manifest["parity"])
        == set(manifest["validation"])
        == {"model.onnx", "model.pt2", "model.int8.onnx"}
    )
    assert (
        manifest["parity"]["model.onnx"]["same_top1"]
        == manifest["parity"]["model.onnx"]["images"]
        == 40
    )
    assert any(
        line.startswith("model.int8.onnx") and "drop 0.00 points (95 %: " in line
        for line in written.lines
    )
    assert manifest["version"] == base.provenance["digest"][:12]
    pixels = np.random.default_rng(1).integers(0, 256, (2, 3, 16, 16), np.uint8)
    with torch.no_grad():
        expected = base.student.answer(torch.from_numpy(pixels)).numpy()
    assert (
        np.abs(load(describe(written.folder), 1, 1).engine(pixels) - expected).max()
        < 1e-4
    )


def test_no_graph_names_a_folder_of_the_machine_that_exports(subject, tmp_path):
    """torch notes where each operation was called, with the path of the source file."""
    written = write(subject(), tmp_path / "export", ExportOptions(pt2=True, int8=True))
    for file in written.folder.glob("model.*"):
        content = file.read_bytes()
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(file) as members:
            content = b"".join(map(members.read, members.namelist()))
        for source in (kd.__file__, torch.__file__):
            assert str(Path(source).parent).encode() not in content, file


def test_calibration_fixes_confidences_and_keeps_predictions(subject, tmp_path):
    """Probabilities that are far too even, as those of `wttm`: every file has the
    temperature.
    """
    pixels = np.random.default_rng(2).integers(0, 256, (200, 3, 16, 16), np.uint8)
    plain = subject().student
    base = subject()
    with torch.no_grad():
        logits = plain.answer(torch.from_numpy(pixels))
        logits -= logits.mean(0)  # random weights answer with one class
    sharp = (logits * 4 / logits.std()).softmax(1)
    labels = torch.multinomial(sharp, 1, generator=torch.Generator().manual_seed(0))[
        :, 0
    ].numpy()
    base = replace(base, images=lambda: nullcontext(lambda limit: [(pixels, labels)]))
    for student in (plain, base.student):
        with torch.no_grad():
            student.network.head.bias -= student.answer(torch.from_numpy(pixels)).mean(
                0
            )
            for parameter in student.network.head.parameters():
                parameter /= logits.std()
    written = write(base, tmp_path / "export", ExportOptions())
    assert any(line.startswith("calibrated: ") for line in written.lines)
    facts = json.loads((written.folder / "kd.json").read_text())["calibration"]
    assert facts["images"] == 200
    assert facts["calibrated_ece"] < 0.5 * facts["ece"], facts
    with torch.no_grad():
        before = plain.answer(torch.from_numpy(pixels)).numpy()
    after = load(describe(written.folder), 1, 1).engine(pixels)
    np.testing.assert_allclose(
        after * facts["temperature"], before, rtol=1e-3, atol=1e-4
    )
    assert written.manifest["version"] != base.provenance["digest"][:12]


def broken(program, path, output, write=runtimes.write_onnx) -> None:
    """A real file of which one weight in ten is wrong; only the comparison can
    notice.
    """
    write(program, path, output)
    graph = onnx.load(path)
    largest = max(graph.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    values = onnx.numpy_helper.to_array(largest).copy()
    values.ravel()[::10] += 1
    largest.CopyFrom(onnx.numpy_helper.from_array(values, largest.name))
    onnx.save(graph, path)


def test_a_broken_graph_is_refused_and_nothing_is_left(subject, tmp_path, monkeypatch):
    monkeypatch.setattr(graphs.runtimes, "write_onnx", broken)
    with pytest.raises(
        ModelError, match=r"^export\.model\.onnx: values differ from PyTorch's by up to"
    ):
        write(subject(), tmp_path / "export", ExportOptions())
    assert not (tmp_path / "export").exists()


def test_a_tolerance_is_kept(subject, tmp_path):
    with pytest.raises(ModelError, match=r"At most 1e-12 \(--tolerance\)"):
        write(subject(), tmp_path / "export", ExportOptions(tolerance=1e-12))


@pytest.mark.parametrize(
    ("named", "task", "words"),
    [
        (
            {"onnx": False, "int8": True},
            SINGLE,
            "--no-onnx: all other graphs are made from model.onnx",
        ),
        ({"onnx": False, "accept": "mb<=1"}, SINGLE, "--no-onnx"),
        ({"compare": True, "threads": 4096}, SINGLE, "--threads: is 4096"),
        ({"accept": "ms<5"}, SINGLE, r"^--accept: 'ms<5' is not WORD<=NUMBER"),
        ({"accept": "ece<=3"}, VECTORS, "--accept: ece needs a student with one class"),
        ({"index": True}, SINGLE, "--index: this student returns classes"),
        (
            {"index": True, "onnx": False},
            VECTORS,
            "--index: is applied inside the graphs",
        ),
        ({"defer": 0.02, "defer_share": 0.1}, SINGLE, "--defer: and --defer-share"),
    ],
)
def test_options_that_do_not_go_together_are_refused(named, task, words):
    with pytest.raises(ConfigError, match=words):
        ExportOptions(**named).require(task)


@pytest.mark.usefixtures("brief")
def test_a_failing_int8_step_leaves_the_float_graphs_of_a_comparison(
    subject, tmp_path, monkeypatch
):
    """Issue 49: before, the error of one candidate threw away what was finished."""

    def fails(source, path):
        path.write_bytes(b"half")
        raise RuntimeError("NotImplemented:\nno kernel")

    monkeypatch.setattr(graphs.runtimes, "write_int8", fails)

    def measure(folder, cpu_ms, *args):
        return {name: {1: Latency(2.0, 3.0, 400.0, 50.0)} for name in cpu_ms}

    # a server has nothing to do with it
    monkeypatch.setattr(graphs.variants, "measure", measure)
    written = write(subject(), tmp_path / "export", ExportOptions(compare=True))
    assert "model.onnx" in files(written.folder)
    assert "model.int8.onnx" not in files(written.folder)
    line = (
        "left out: model.int8.onnx, because writing it failed (RuntimeError:"
        " NotImplemented: no kernel)"
    )
    assert line in written.lines
    with pytest.raises(RuntimeError):  # asked for by name it is an error
        write(subject(), tmp_path / "other", ExportOptions(int8=True))


def test_files_that_a_new_export_leaves_out_are_named(subject, tmp_path):
    folder = tmp_path / "export"
    first = write(subject(), folder, ExportOptions(int8=True))
    assert not any("replaced export" in line for line in first.lines)
    second = write(subject(), folder, ExportOptions())
    assert second.lines[-1] == "removed with the replaced export: model.int8.onnx"


def test_foreign_files_added_during_an_export_are_kept(subject, tmp_path):
    """The check before the work says nothing of the minutes that follow."""

    def exported_while(folder, file):
        with new_export(folder) as draft:
            (draft / "config.json").write_text("{}")
            folder.mkdir(exist_ok=True)
            (folder / file).write_text("mine")

    folder = tmp_path / "export"
    fresh = tmp_path / "fresh"
    write(subject(), folder, ExportOptions(onnx=False))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RunError, match=r"notes\.txt"):
        exported_while(folder, "notes.txt")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        **before,
        "notes.txt": b"mine",
    }
    with pytest.raises(RunError, match="not an exported model"):
        exported_while(fresh, "mine.jpg")
    assert [path.name for path in fresh.iterdir()] == ["mine.jpg"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "fresh"]


@pytest.mark.parametrize(
    ("kinds", "teachers", "expected"),
    [(["tokens", "cosine"], 2, 2), (["tokens", "cosine"], 1, 1), (["cosine"], 2, 0)],
)
def test_the_projector_is_that_of_the_first_term_that_projects(
    kinds, teachers, expected
):
    """A loss on features has a term for each teacher; the weights of each term are its
    number.
    """
    losses = [
        LossSection(kind=kind, options=registry.default_options("losses", kind))
        for kind in kinds
    ]
    tensors = {}
    for number in range(4):
        prefix = f"model.criterion.terms.{number}.project"
        tensors |= {
            f"{prefix}.weight": torch.full((4, 3), float(number)),
            f"{prefix}.bias": torch.zeros(4),
        }
    folder = SimpleNamespace(best=lambda: (None, tensors, None))
    assert learned_projector(folder, losses, teachers).weight[0, 0] == expected

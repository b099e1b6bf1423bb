"""Each kind of teacher: the same student live, cached and resumed; its identity; each
wrong combination in one line.
"""

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pieces import merged, slow, with_tokenizer
from safetensors.torch import load_file, save_file

import kd
from kd import config
from kd.core.errors import KdError, ModelError
from kd.models.answer_table import AnswerTable, read_answers, write_answers
from kd.models.classifier import main_output
from kd.setup.build_teacher import load_teachers
from kd.setup.data import open_sources
from kd.setup.recipe import resolve

EXAMPLES = Path(__file__).parents[4] / "examples"
KINDS = ("transformers", "zero_shot", "torch", "onnx", "answers")
pytestmark = pytest.mark.usefixtures("examples")


@pytest.fixture(scope="session")
def sections(photos, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """The `teacher` section of each kind. Do not write into their folders."""
    pytest.importorskip("transformers")
    sys.path.insert(0, str(EXAMPLES))
    from any_teacher import make

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return make(
            photos, tmp_path_factory.mktemp("teachers"), size=16, width=16, epochs=3
        )
    finally:
        torch.set_num_threads(threads)
        sys.path.remove(str(EXAMPLES))


@pytest.fixture
def examples(monkeypatch) -> None:
    """Make `any_teacher` importable, as PYTHONPATH does."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def load(settings, section, **read_outputs):
    """Load a teacher as a run does; `read_outputs`: outputs that the losses read, in
    place of theirs.
    """
    recipe = resolve(
        config.load(merged(settings, {"teacher": {**section, "min_accuracy": 0.0}}))
    )
    object.__setattr__(recipe, "read", replace(recipe.read, **read_outputs))
    return load_teachers(recipe, open_sources(recipe.data), {}).model


@pytest.fixture
def bare(settings):
    """Settings without a teacher."""
    return {**settings, "teacher": {"precision": "fp32"}}


def train(bare, section, name, *overrides, **sections):
    changed = merged(bare, {"teacher": section, "run": {"name": name}, **sections})
    return kd.train(changed, *overrides)


def student(run) -> dict[str, torch.Tensor]:
    newest = max((run.folder / "checkpoints").iterdir())
    return load_file(newest / "tensors.safetensors")


@pytest.mark.parametrize(
    "kind",
    [
        slow(kind) if kind in ("transformers", "zero_shot", "onnx") else kind
        for kind in KINDS
    ],
)
def test_live_and_resumed_are_one_run_and_cached_too(kind, sections, bare):
    section = sections[kind]
    uninterrupted = train(bare, section, "whole", "run.every.checkpoint=4")
    assert uninterrupted.metrics["teacher_accuracy"] == 1.0
    again = train(bare, section, "again", "run.every.checkpoint=4")
    for folder in sorted((again.folder / "checkpoints").iterdir())[1:]:
        shutil.rmtree(folder)
    resumed = train(bare, section, "again", "run.every.checkpoint=4")
    expected = student(uninterrupted)
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in student(resumed).items()
    )
    views = ("data.views=1", "run.epochs=1")
    live = train(bare, section, "live", *views)
    cached = train(
        bare,
        section,
        "cached",
        *views,
        "teacher.cache.views=1",
        "teacher.cache.dtype=fp32",
    )
    for name, tensor in student(cached).items():
        torch.testing.assert_close(tensor, student(live)[name], rtol=1e-3, atol=1e-4)


def test_every_kind_has_an_identity_of_its_own(sections, bare, tmp_path):
    identities = {
        kind: load(bare, section).identity() for kind, section in sections.items()
    }
    assert len({identity["teacher"] for identity in identities.values()}) == len(
        identities
    )
    assert all(
        json.loads(json.dumps(identity)) == identity for identity in identities.values()
    )
    for kind, section in sections.items():
        assert load(bare, section).identity() == identities[kind]
    restandardized = load(
        bare, {**sections["torch"], "std": [1.0, 1.0, 1.0]}
    ).identity()
    assert restandardized["teacher"] == identities["torch"]["teacher"]
    assert restandardized != identities["torch"]
    scaled = load(bare, {**sections["zero_shot"], "scale": 5.0}).identity()
    assert scaled != identities["zero_shot"]


def test_several_kinds_are_averaged(sections, bare):
    first, *further = sections.values()
    run = train(
        bare,
        {**first, "also": further},
        "several",
        "run.epochs=1",
        "teacher.cache.views=1",
    )
    assert run.metrics["teacher_accuracy"] == 1.0
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert manifest["modes"]["teacher"] == "fp32+unfused"


def test_a_network_has_equal_outputs_in_torch_onnx_and_a_table(sections, bare, photos):
    models = {
        kind: load(bare, sections[kind]).eval() for kind in ("torch", "onnx", "answers")
    }
    source = (
        models["answers"]
        and open_sources(
            resolve(config.load(merged(bare, {"teacher": sections["torch"]}))).data
        ).val
    )
    pixels = np.stack(
        [np.asarray(source.decode(id).image.resize((16, 16))) for id in range(3)]
    )
    image = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())
    ids = torch.arange(3)
    with torch.no_grad():
        outputs = [
            models["torch"](image),
            models["onnx"](image),
            models["answers"].validation()(image, ids),
        ]
    for output in outputs[1:]:
        torch.testing.assert_close(
            output.logits, outputs[0].logits, rtol=1e-4, atol=1e-4
        )


def test_features_of_transformers_are_those_of_the_library(sections, bare):
    """Pooled is what the classifier takes; tokens are the patches', without the class
    token.
    """
    from transformers import AutoModelForImageClassification, CLIPModel

    image = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    features = ("pooled", "tokens")
    model = load(bare, sections["transformers"], features=features).eval()
    alone = AutoModelForImageClassification.from_pretrained(
        sections["transformers"]["model"]
    ).eval()
    clip = {"kind": "transformers", "model": sections["zero_shot"]["model"]}
    tower = load(bare, clip, features=features, teacher_logits=False)
    clip_model = CLIPModel.from_pretrained(clip["model"]).eval()
    with torch.no_grad():
        outputs = model(image)
        hidden = alone.vit(model.normalize(image)).last_hidden_state
        torch.testing.assert_close(
            alone.classifier(outputs.features["pooled"]), outputs.logits
        )
        torch.testing.assert_close(outputs.features["tokens"], hidden[:, 1:])
        tower_outputs = tower.eval()(image)
        pixels = tower.normalize(image)
        expected = clip_model.get_image_features(pixel_values=pixels)
        torch.testing.assert_close(
            tower_outputs.features["pooled"],
            getattr(expected, "pooler_output", expected),
        )
        expected = clip_model.vision_model(pixel_values=pixels).last_hidden_state[:, 1:]
        torch.testing.assert_close(tower_outputs.features["tokens"], expected)
    assert tower_outputs.logits.shape == (2, 0)


def test_zero_shot_is_the_scaled_cosine(sections, bare):
    from transformers import CLIPModel

    model = load(bare, sections["zero_shot"]).eval()
    image = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    vectors = load_file(sections["zero_shot"]["vectors"])["vectors"].double()
    alone = CLIPModel.from_pretrained(sections["zero_shot"]["model"]).eval()
    with torch.no_grad():
        outputs = alone.get_image_features(pixel_values=model.normalize(image))
        features = getattr(outputs, "pooler_output", outputs).double()
        cosine = torch.nn.functional.cosine_similarity(
            features[:, None], vectors[None], dim=-1
        )
        expected = alone.logit_scale.double().exp() * cosine
        torch.testing.assert_close(
            model(image).logits.double(), expected, rtol=1e-4, atol=1e-4
        )


def test_a_siglip_is_a_zero_shot_teacher_too(sections, bare, tmp_path):
    """The scale is the learned one, or the one that is given; then the image tower
    alone is loaded.
    """
    from transformers import SiglipConfig, SiglipModel, ViTImageProcessor

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = SiglipConfig(
        text_config={**sizes, "vocab_size": 64, "max_position_embeddings": 16},
        vision_config={**sizes, "image_size": 16, "patch_size": 8},
    )
    both = SiglipModel(config)
    save_file({"vectors": torch.randn(3, 16)}, tmp_path / "vectors.safetensors")
    both.save_pretrained(tmp_path / "both")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(
        tmp_path / "both"
    )
    section = {"kind": "zero_shot", "vectors": str(tmp_path / "vectors.safetensors")}
    image = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        learned = (
            load(bare, {**section, "model": str(tmp_path / "both")})
            .eval()(image)
            .logits
        )
        given_scale = (
            load(bare, {**section, "model": str(tmp_path / "both"), "scale": 10.0})
            .eval()(image)
            .logits
        )
    torch.testing.assert_close(
        given_scale, learned / both.logit_scale.exp().item() * 10, rtol=1e-4, atol=1e-4
    )


def test_class_vectors_come_from_the_text_tower(sections, bare, tmp_path):
    """Two prompts are averaged as unit vectors."""
    from transformers import CLIPModel

    folder = tmp_path / "clip"
    shutil.copytree(sections["zero_shot"]["model"], folder)
    words = with_tokenizer(folder, "a photo of apple fig pear ripe")
    section = {
        "kind": "zero_shot",
        "model": str(folder),
        "prompts": ["a photo of a {}", "ripe {}"],
    }
    vectors = load(bare, section).network.vectors
    alone = CLIPModel.from_pretrained(folder).eval()
    for label, name in enumerate(("apple", "fig", "pear")):
        units = []
        for text in (f"a photo of a {name}", f"ripe {name}"):
            ids = torch.tensor([[1, *(words.index(word) for word in text.split()), 2]])
            with torch.no_grad():
                outputs = alone.get_text_features(input_ids=ids)
            units.append(
                torch.nn.functional.normalize(
                    getattr(outputs, "pooler_output", outputs), dim=1
                )[0]
            )
        expected = torch.nn.functional.normalize(torch.stack(units).mean(0), dim=0)
        torch.testing.assert_close(vectors[label], expected, rtol=1e-4, atol=1e-5)


def test_the_page_s_clip_teaches_images_without_labels(sections, settings, tmp_path):
    """The file of docs/weights.md with random weights: the classes are the names'."""
    page = (EXAMPLES.parent / "docs" / "weights.md").read_text()
    (text,) = re.findall(r"^(# clip\.yaml\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names = ["pear", "plum"]  # the photographs are of others, and have no labels
    folder = tmp_path / "clip"
    shutil.copytree(sections["zero_shot"]["model"], folder)
    with_tokenizer(folder, f"a photo close-up of {' '.join(names)} .")
    (tmp_path / "names.txt").write_text("\n".join(names))
    page_config = yaml.safe_load(text.replace("FOLDER", settings["data"]["root"]))
    page_config["data"] |= {"image_size": 16, "batch_size": 8, "workers": 0}
    page_config["teacher"] |= {"model": str(folder), "precision": "fp32"}
    page_config["teacher"]["classes"] = str(tmp_path / "names.txt")
    run = {**settings["run"], "name": "clip", "epochs": 1, "steps": 2}
    trained = kd.train(
        {**settings, **page_config, "run": run, "student": settings["student"]}
    )
    assert "accuracy" not in trained.metrics
    assert 0 <= trained.metrics["agreement"] <= 1
    written = json.loads((trained.export().folder / "config.json").read_text())
    assert written["label_names"] == names


def changed(section, **values):
    return {
        key: value for key, value in {**section, **values}.items() if value is not None
    }


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (
            "torch",
            {"model": "any_teacher"},
            r"teacher\.model: is 'any_teacher'\. Allowed: module:function",
        ),
        (
            "torch",
            {"model": "any_teacher:netwerk"},
            r"teacher\.model: .*no function 'netwerk'",
        ),
        (
            "torch",
            {"model": "any_teachers:network"},
            r"teacher\.model: .*'any_teachers' cannot be imported",
        ),
        ("torch", {"mean": None, "std": None}, r"teacher\.mean: is missing"),
        ("torch", {"args": {"colour": 1}}, r"teacher\.args: .*refuses them"),
        (
            "torch",
            {"args": {"classes": 4}},
            r"teacher\.checkpoint: the weights are not those of .*other shape",
        ),
        (
            "torch",
            {"args": {"classes": 4}, "checkpoint": ""},
            r"teacher\.model: has 4 classes, the data has 3",
        ),
        (
            "torch",
            {"outputs": "probabilities"},
            r"teacher\.outputs: is probabilities, but the outputs are no prob",
        ),
        (
            "torch",
            {"precision": "int8", "classes": "none.txt"},
            r"teacher\.classes: 'none\.txt' cannot be read",
        ),
        (
            "transformers",
            {"args": {"trust_remote_code": True}},
            r"teacher\.args: has trust_remote_code, which runs code",
        ),
        (
            "zero_shot",
            {"args": {"trust_remote_code": False}},
            r"teacher\.args: has trust_remote_code, which runs code",
        ),
        ("onnx", {"mean": None, "std": None}, r"teacher\.mean: is missing"),
        ("onnx", {"model": "none.onnx"}, r"teacher\.model: no file 'none\.onnx'"),
        (
            "onnx",
            {"checkpoint": "a"},
            r"teacher\.checkpoint: is set, but a graph holds its weights",
        ),
        ("onnx", {"output": "embedding"}, r"teacher\.output: .*has the outputs logits"),
        (
            "onnx",
            {"precision": "bf16"},
            r"teacher\.precision: is bf16, but teacher .* runs in onnxruntime",
        ),
        (
            "onnx",
            {"runtime": "openvino"},
            r"teacher\.runtime: is openvino, but teacher .* runs in onnxruntime",
        ),
        (
            "answers",
            {"shard": True},
            (
                r"teacher\.shard: is set, but kd does not divide a teacher of kind"
                r" 'answers'"
            ),
        ),
        (
            "transformers",
            {"pipeline": 2},
            r"teacher\.pipeline: is set, but kd does not divide .*'transformers'",
        ),
        (
            "answers",
            {"outputs": "probabilities"},
            r"teacher\.outputs: is probabilities",
        ),
        (
            "answers",
            {"model": "none.csv"},
            r"teacher\.model: 'none\.csv' cannot be read as a table of outputs",
        ),
        (
            "answers",
            {"model": "none.txt"},
            r"teacher\.model: is 'none\.txt'\. A file that ends in",
        ),
        (
            "transformers",
            {"model": "none/nowhere/at/all"},
            r"teacher\.model: there is no folder 'none/nowhere/at/all'",
        ),
        (
            "transformers",
            {"checkpoint": "a"},
            r"teacher\.checkpoint: is set, but the folder",
        ),
        (
            "zero_shot",
            {"vectors": "none.safetensors"},
            r"teacher\.vectors: 'none\.safetensors' cannot be read",
        ),
        (
            "zero_shot",
            {"vectors": ""},
            r"teacher\.model: .*tokenizer.*teacher\.vectors",
        ),
        ("zero_shot", {"prompts": ["a photo"]}, r"teacher\.prompts: are"),
        (
            "transformers",
            {"fit": {"epochs": 2}},
            r"teacher\.fit\.epochs: .*does not fit a teacher of kind 'transf",
        ),
    ],
)
def test_a_wrong_combination_is_one_line(
    kind, values, message, sections, bare, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KdError, match=f"^{message}") as caught:
        load(bare, changed(sections[kind], **values))
    assert "\n" not in str(caught.value)


def test_another_class_order_is_reordered_unless_the_model_names_its_own(
    sections, bare, tmp_path
):
    (tmp_path / "names.txt").write_text("apple\npear\nfig\n")
    image = torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8)
    for kind in ("torch", "onnx", "zero_shot"):  # its vectors have no names
        section = sections[kind]
        models = [
            load(bare, variant)
            for variant in (
                section,
                {**section, "classes": str(tmp_path / "names.txt")},
            )
        ]
        with torch.no_grad():
            plain, reordered = (variant(image).logits for variant in models)
        torch.testing.assert_close(reordered, plain[:, [0, 2, 1]])
        assert list(models[1].classes) == ["apple", "fig", "pear"]
    for kind in ("transformers", "answers"):
        with pytest.raises(
            ModelError,
            match=r"^teacher\.classes: .* own class names in another order: apple, fig",
        ):
            load(bare, {**sections[kind], "classes": str(tmp_path / "names.txt")})


def test_a_model_without_classes_names_what_to_do(sections, bare):
    with pytest.raises(
        ModelError,
        match=r"^teacher\.model: .* is a CLIPModel, which has no classes.*zero_shot",
    ):
        load(bare, {"kind": "transformers", "model": sections["zero_shot"]["model"]})
    with pytest.raises(
        ModelError, match=r"^teacher\.model: .* is a vit\. One of: clip"
    ):
        load(
            bare, {**sections["zero_shot"], "model": sections["transformers"]["model"]}
        )


def test_weights_and_preprocessing_must_be_there(sections, bare, tmp_path):
    folder = tmp_path / "vit"
    shutil.copytree(sections["transformers"]["model"], folder)
    (folder / "preprocessor_config.json").rename(folder / "kept.json")
    with pytest.raises(
        ModelError, match=r"^teacher\.model: .*no preprocessor_config\.json"
    ):
        load(bare, {"kind": "transformers", "model": str(folder)})
    (folder / "kept.json").rename(folder / "preprocessor_config.json")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: t for name, t in tensors.items() if "classifier" not in name},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(
        ModelError, match=r"^teacher\.model: .*lacks 2 weights .*classifier"
    ):
        load(bare, {"kind": "transformers", "model": str(folder)})


def test_a_pickle_that_runs_code_is_refused(sections, bare, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "touched",))

    torch.save({"state_dict": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(
        ModelError, match=r"^teacher\.checkpoint: .*cannot be read as weights"
    ):
        load(bare, {**sections["torch"], "checkpoint": str(tmp_path / "evil.pth")})
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("inside", ["initializer", "attribute"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../../../../../../dev/zero", "outside its folder"),
        ("/dev/zero", "outside its folder"),
        ("link", "outside its folder"),
        ("link/zero", "outside its folder"),
        ("fifo", "no regular file"),
        ("folder", "no regular file"),
        ("gone", "no regular file"),
        ("", "no regular file"),
        ("folder/\0", "outside its folder"),
    ],
)
def test_the_weights_of_a_graph_lie_in_its_folder(
    name, message, inside, bare, tmp_path
):
    """Nothing reads these tensors: onnxruntime opens no file of theirs, but the hash
    read /dev/zero for ever.
    """
    onnx = pytest.importorskip("onnx")
    make = onnx.helper
    kind = onnx.TensorProto.FLOAT
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev")
    os.mkfifo(tmp_path / "fifo")
    unused = onnx.TensorProto(
        name="unused", data_type=kind, dims=[4], data_location=onnx.TensorProto.EXTERNAL
    )
    unused.external_data.add(key="location", value=name)
    ends = [
        [make.make_tensor_value_info(name, kind, size)]
        for name, size in (("x", ["B", 3, 16, 16]), ("y", None))
    ]
    nodes = [make.make_node("ReduceMax", ["x"], ["y"], axes=[2, 3], keepdims=0)]
    initializers = [unused]
    if inside == "attribute":
        nodes = [
            *nodes,
            make.make_node("Constant", [], ["z"], value=unused),
        ]
        initializers = []
    graph = make.make_graph(nodes, "g", *ends, initializers)
    opset = [make.make_opsetid("", 13)]
    onnx.save(
        make.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "g.onnx"
    )
    section = {
        "kind": "onnx",
        "model": str(tmp_path / "g.onnx"),
        "mean": [0, 0, 0],
        "std": [1, 1, 1],
    }
    with pytest.raises(
        ModelError,
        match=rf"^teacher\.model: .*g\.onnx' has weights in .*, which is {message}",
    ):
        load(bare, section)


def test_weights_beside_a_graph_count(sections, bare, tmp_path):
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(sections["onnx"]["model"])
    onnx.save(
        graph,
        tmp_path / "g.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=256,
    )
    beside, inside = (
        load(bare, {**sections["onnx"], **changes})
        for changes in ({"model": str(tmp_path / "g.onnx")}, {})
    )
    image = torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8)
    torch.testing.assert_close(beside(image).main, inside(image).main)
    before = beside.identity()["teacher"]
    with (tmp_path / "weights.bin").open("ab") as file:
        file.write(b"1")
    assert beside.identity()["teacher"] != before


def test_a_table_is_the_same_in_every_format(sections, bare, tmp_path):
    table = read_answers(sections["answers"]["model"], "teacher.model")
    values = table.values[0].double().numpy()
    names = list(table.names)
    np.savez(
        tmp_path / "a.npz",
        logits=values.astype(np.float32),
        names=np.array(names),
        classes=list(table.classes),
    )
    lines = [
        ",".join([name, *(repr(float(x)) for x in row)])
        for name, row in zip(names, values, strict=True)
    ]
    (tmp_path / "a.csv").write_text(
        "\n".join([",".join(["name", *table.classes]), *lines]) + "\n"
    )
    write_answers(tmp_path / "a.safetensors", table)
    expected = load(bare, sections["answers"]).identity()["teacher"]
    for ending in ("npz", "csv", "safetensors"):
        teacher = load(
            bare, {"kind": "answers", "model": str(tmp_path / f"a.{ending}")}
        )
        assert teacher.identity()["teacher"] == expected, ending


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"names": t.names[1:]}, "49 outputs and 48 names"),
        (
            lambda t: {"names": t.names[1:], "values": t.values[:, 1:]},
            "no output for 1 of 36 training images",
        ),
        (
            lambda t: {"names": t.names[:-1], "values": t.values[:, :-1]},
            "no output for 1 of 13 validation",
        ),
        (lambda t: {"values": t.values * np.nan}, "has NaN or infinity"),
        (lambda t: {"values": t.values[..., :2]}, "2 numbers per image and 3 classes"),
        (
            lambda t: {"values": t.values[..., :2], "classes": t.classes[:2]},
            "has 2 classes, the data has 3",
        ),
        (
            lambda t: {"meaning": "embeddings", "classes": ()},
            "holds embeddings, but the losses need logits",
        ),
        (
            lambda t: {"values": t.values.expand(2, -1, -1)},
            "does not describe its views",
        ),
        (
            lambda t: {"made_for": {"views": 3}},
            "views of another views \\(3\\); this run has 0",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    change, message, sections, bare, tmp_path
):
    table = read_answers(sections["answers"]["model"], "teacher.model")
    write_answers(tmp_path / "b.safetensors", replace(table, **change(table)))
    with pytest.raises(ModelError, match=rf"^teacher\.model.*: .*{message}"):
        load(bare, {"kind": "answers", "model": str(tmp_path / "b.safetensors")})


@pytest.mark.parametrize(
    ("split_names", "message"),
    [
        (torch.full((2, 3), float("nan")), "it has NaN or infinity"),
        (torch.zeros(2, 4), "outputs of several widths"),
        (torch.zeros(2, 2, 3), "not an array of floating point numbers"),
        (torch.zeros(1, 3), "50 outputs and 51 names"),
    ],
)
def test_outputs_for_validation_images_are_checked_too(
    split_names, message, sections, tmp_path
):
    """NaN became a class: the teacher's accuracy and the agreement were wrong, and
    nothing was said.
    """
    table = read_answers(sections["answers"]["model"], "teacher.model")
    table = AnswerTable(
        "logits", table.names, table.values, table.classes, ["a", "b"], split_names
    )
    write_answers(tmp_path / "c.safetensors", table)
    with pytest.raises(ModelError, match=message):
        read_answers(str(tmp_path / "c.safetensors"), "teacher.model")


def test_a_test_split_does_not_change_a_table(sections, bare, photos, tmp_path):
    """A finished run is scored on images that its table has answers for, and is the
    same run.
    """
    root = shutil.copytree(photos, tmp_path / "photos")
    file = tmp_path / "more.safetensors"
    shutil.copytree(photos / "val", root / "test")
    table = read_answers(sections["answers"]["model"], "teacher.model")
    rows = [i for i, name in enumerate(table.names) if name.startswith("val/")]
    names = [*table.names, *(table.names[i].replace("val/", "test/") for i in rows)]
    write_answers(
        file,
        replace(
            table,
            names=names,
            values=torch.cat([table.values, table.values[:, rows]], 1),
        ),
    )
    section = {**sections["answers"], "model": str(file)}
    data = f"data.root={root}"
    first = train(bare, section, "one", data)
    again = train(bare, section, "one", data, "data.test_split=test")
    assert all(
        torch.equal(tensor, student(first)[name])
        for name, tensor in student(again).items()
    )


def test_a_table_does_not_go_with_mixed_images(sections, bare):
    settings = merged(bare, {"data": {"augment": {"mixup": 0.5}}})
    with pytest.raises(
        ModelError, match=r"^data\.augment: mixes images, but the table"
    ):
        load(settings, sections["answers"])


def test_an_exported_cache_is_the_teacher_that_filled_it(
    sections, bare, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    views = ("data.views=2", "run.epochs=2", "data.augment.mixup=0.2")
    cached_run = merged(bare, {"teacher": sections["transformers"]})
    Path("one.yaml").write_text(config.dump(config.load(cached_run)))
    answer = command(
        "cache",
        "one.yaml",
        *views,
        "teacher.cache.views=2",
        "--export",
        "said.safetensors",
    )
    assert answer.code == 0, answer
    table = read_answers("said.safetensors", "x")
    assert table.values.shape == (2, 36, 3)
    assert len(table.val_names) == 13
    cached = train(
        bare, sections["transformers"], "cached", *views, "teacher.cache.views=2"
    )
    shared = train(
        bare, {"kind": "answers", "model": "said.safetensors"}, "shared", *views
    )
    expected = student(cached)
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in student(shared).items()
    )
    with pytest.raises(
        ModelError,
        match=(
            r"^teacher\.model: has outputs for views of another seed \(0\); this run"
            r" has 1"
        ),
    ):
        train(
            bare,
            {"kind": "answers", "model": "said.safetensors"},
            "other",
            *views,
            "run.seed=1",
        )


def test_an_exported_cache_of_whole_images_is_for_any_augmentation(
    sections, bare, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    cached = merged(bare, {"teacher": sections["transformers"]})
    Path("one.yaml").write_text(config.dump(config.load(cached)))
    unchanged = {"crop_scale": 1, "flip": 0, "jitter": 0, "erase": 0, "mixup": 0}
    keys = [f"data.augment.{key}={value}" for key, value in unchanged.items()]
    words = ["teacher.cache.views=1", "--export", "whole.safetensors"]
    answer = command("cache", "one.yaml", *keys, *words)
    assert answer.code == 0, answer
    table = read_answers("whole.safetensors", "x")
    assert table.made_for == {}
    section = {"kind": "answers", "model": "whole.safetensors"}
    fresh = ("run.seed=1", "data.augment.crop_scale=0.4", "data.augment.flip=0.5")
    run = train(bare, section, "whole", *fresh)
    notes = json.loads((run.folder / "manifest.json").read_text())
    assert "whole images" in json.dumps(notes)


def test_an_exported_cache_has_outputs_for_test_images(
    sections, bare, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tested = merged(
        bare, {"teacher": sections["transformers"], "data": {"test_fraction": 0.4}}
    )
    Path("one.yaml").write_text(config.dump(config.load(tested)))
    answer = command(
        "cache", "one.yaml", "teacher.cache.views=1", "--export", "answers.safetensors"
    )
    assert answer.code == 0, answer
    rows = [
        json.loads(
            (
                train(
                    bare, section, name, "data.views=1", "data.test_fraction=0.4"
                ).folder
                / "scored.json"
            ).read_text()
        )
        for name, section in (
            ("live", sections["transformers"]),
            ("table", {"kind": "answers", "model": "answers.safetensors"}),
        )
    ]
    assert rows[0]["split"] == rows[1]["split"] == "test"
    assert rows[0]["row"]["teacher_accuracy"] == rows[1]["row"]["teacher_accuracy"]


def test_invalid_outputs_of_a_module_are_refused():
    tensor = torch.zeros(2, 3)

    class WithLogits:
        logits = tensor

    class WithPooled:
        pooler_output = tensor

    for output in (
        tensor,
        (tensor, 1),
        [tensor],
        WithLogits(),
        WithPooled(),
        {"logits": tensor},
    ):
        assert main_output(output, "teacher") is tensor
    with pytest.raises(ModelError, match=r"^teacher: the model returns str"):
        main_output("x", "teacher")

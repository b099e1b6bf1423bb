"""What `--check` says of classes, weights and memory, and whose seed, batch size and
views a teacher's fit has.
"""

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants as hub
import pytest
import timm
import torch
from safetensors.torch import save_file

import kd
from kd import config
from kd.config.tuning import Augment
from kd.core.errors import ConfigError, ConfigErrors, ModelError, RunError
from kd.core.types import State
from kd.files.pixels import HEIF
from kd.files.run_dir import RunDir
from kd.jobs.check import check
from kd.jobs.description import describe
from kd.jobs.distill import filling_ends
from kd.jobs.train import open_run, teach
from kd.models import timm_folder
from kd.setup.data import split_batch
from kd.setup.recipe import Record, match_baseline_length, resolve


def lines(settings: dict, *overrides: str) -> dict[str, str]:
    """Return what `--check` says, by the first word of a line."""
    return {
        line.split()[0]: line
        for line in describe(resolve(config.load(settings, overrides))).splitlines()
    }


@pytest.mark.parametrize(
    ("imbalance", "message"),
    [
        (1, ""),
        (3, ""),
        (
            30,
            "the 3 largest have 62 % of the images (410 to 221 each, the smallest 14)",
        ),
    ],
)
def test_uneven_classes_are_reported(
    settings: dict, tmp_path: Path, imbalance: int, message: str
):
    data = {
        "kind": "food_mini",
        "root": str(tmp_path),
        "train_images": 410,
        "imbalance": imbalance,
    }
    uneven = {
        **settings,
        "data": {**data, "image_size": 16, "batch_size": 8},
        "teacher": {},
        "losses": [{"kind": "ce"}],
    }
    reported = lines(uneven)
    assert ("classes" in reported) == bool(message)
    assert message in reported.get("classes", "")
    assert not list(tmp_path.iterdir())


def test_files_that_are_not_read_are_shown_by_check_and_by_the_run(
    settings: dict, photos: Path, tmp_path: Path, caplog
):
    root = tmp_path / "photos"
    shutil.copytree(photos, root)
    for name in ("train/plum/1.HEIC", "train/plum/2.HEIC", "val/fig/notes.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"x")
    values = {**settings, "data": {**settings["data"], "root": str(root)}}
    if HEIF:
        pytest.skip("pillow-heif is installed: the files would be read")
    heic = (
        "2 files are not read: 2 .HEIC (pillow-heif reads them: pip install"
        " 'PATH/kd[heic]')"
    )
    expected = [
        heic,
        "1 folder has no image and is no class: train/plum",
        "1 file is not read: 1 .txt",
    ]
    checked = describe(resolve(config.load(values))).splitlines()
    assert [
        line.strip() for line in checked if "no image and" in line or "not read" in line
    ] == expected
    with caplog.at_level(logging.INFO, "kd"):
        kd.train(values, "run.steps=1", "run.epochs=1")
    assert [message for message in caplog.messages if message.startswith("data: ")] == [
        f"data: {line}" for line in expected
    ]


PRETRAINED = ("student.init=pretrained", "student.model=test_vit", "student.args={}")
FITTED = ("teacher={model: test_vit, pretrained: true, fit: {epochs: 1}}",)


@pytest.fixture
def cached(monkeypatch, tmp_path) -> Path:
    """The hub's cache, empty."""
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def answering(monkeypatch, cached) -> Iterator[Callable[[int], list[str]]]:
    """Start a hub that answers with a status, 0: never; return the paths that it was
    asked for.
    """
    running: list[ThreadingHTTPServer] = []
    end = threading.Event()

    def start(status: int) -> list[str]:
        requests: list[str] = []

        class Hub(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append(self.path)
                if not status:
                    end.wait(10)
                    return
                body = json.dumps({"id": "timm/test_vit", "error": "no"}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        running.append(ThreadingHTTPServer(("127.0.0.1", 0), Hub))
        running[-1].daemon_threads = True
        threading.Thread(target=running[-1].serve_forever, daemon=True).start()
        monkeypatch.setattr(
            hub, "ENDPOINT", f"http://127.0.0.1:{running[-1].server_address[1]}"
        )
        return requests

    yield start
    end.set()
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("overrides", "key"), [(PRETRAINED, "student"), (FITTED, "teacher")]
)
def test_weights_out_of_reach_name_their_key(
    settings, answering, monkeypatch, cached, overrides, key
):
    """The hub was asked for a minute in the fit, and the student was blamed for the
    teacher's weights.
    """
    monkeypatch.setattr(timm_folder, "HUB_SECONDS", 0.3)
    for status in (404, 0):
        answering(status)
        with pytest.raises(
            ModelError,
            match=rf"^{key}\.model: .*'test_vit' are not here.* within 0\.3 s",
        ):
            lines(settings, *overrides)
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=rf"^{key}\.model: .*OfflineModeIsEnabled"):
        lines(settings, *overrides)
    repository = timm.get_pretrained_cfg("test_vit").hf_hub_id
    file = (
        cached
        / f"models--{repository.replace('/', '--')}"
        / "snapshots"
        / "0a"
        / "model.safetensors"
    )
    file.parent.mkdir(parents=True)
    file.touch()
    assert "pretrained" in lines(settings, *overrides)["student"] or key == "teacher"


def test_weights_in_reach_are_not_downloaded(settings, answering, monkeypatch, cached):
    monkeypatch.setattr(timm_folder, "HUB_SECONDS", 60)  # a busy machine
    requests = answering(200)
    assert lines(settings, *PRETRAINED)["student"].endswith("init pretrained")
    repository = timm.get_pretrained_cfg("test_vit").hf_hub_id
    paths = [path.partition("?")[0] for path in requests]
    # the first request of a process also fetches the names of agents, for its
    # User-Agent
    assert [path for path in paths if path != "/api/agent-harnesses"] == [
        f"/api/models/{repository}"
    ]
    assert not cached.exists()


def test_a_network_that_fails_on_the_images_is_one_line(settings):
    crossvit = {
        "model": "crossvit_9_240"
    }  # two patch sizes, of which one does not divide the images
    with pytest.raises(
        ModelError, match=r"^student\.model: 'crossvit_9_240' fails on images of "
    ):
        lines({**settings, "student": crossvit}, "data.image_size=64")
    with pytest.raises(
        ModelError, match=r"^teacher\.model: 'crossvit_9_240' fails on images of "
    ):
        teach(
            config.load(
                {**settings, "teacher": {**crossvit, "fit": {"steps": 1}}},
                ("data.image_size=64",),
            )
        )


def test_a_checkpoint_that_does_not_fit_is_found_before_the_fit(settings, tmp_path):
    """`--check` passed, and the run ended with the same line after the
    teacher's fit.
    """
    pickled, foreign, seven_classes = (
        str(tmp_path / name)
        for name in ("a.safetensors", "b.safetensors", "c.safetensors")
    )
    torch.save({"weight": torch.zeros(1)}, pickled)
    save_file({"body.weight": torch.zeros(3)}, foreign)
    save_file(
        timm.create_model("test_vit2", num_classes=7, img_size=32).state_dict(),
        seven_classes,
    )
    for file, wrong in (
        (pickled, r"unexpected: weight \(1\)"),
        (foreign, "body.weight"),
    ):
        with pytest.raises(ModelError, match=rf"^student\.checkpoint: .*{wrong}"):
            lines(settings, "student.init=pretrained", f"student.checkpoint={file}")
    vit_settings = {**settings, "student": {"model": "test_vit2", "init": "pretrained"}}
    assert (
        "test_vit2"
        in lines(vit_settings, f"student.checkpoint={seven_classes}")["student"]
    )


def test_memory_is_that_of_the_largest_phase(settings):
    """The fit of a teacher takes 16 bytes a parameter; that of the student alone was
    said.
    """
    reported = lines(
        settings, "teacher={model: vit_base_patch16_224, fit: {epochs: 1}}"
    )
    millions = float(reported["teacher"].split(":")[1].split()[0])
    assert float(reported["memory"].split()[1]) == pytest.approx(
        millions * 16e6 / 2**20, abs=1
    )
    assert "in the fit of teacher" in reported["memory"]
    assert "in distillation" in reported["memory"]


def test_a_fit_is_augmented_without_the_students_mixing_and_strong_crop(settings):
    """A teacher of 72 % came out at 63 with the student's mixup."""

    def fit(*overrides: str) -> Augment:
        return (
            resolve(config.load(settings, ["teacher.fit.epochs=1", *overrides]))
            .fits["teacher"]
            .data.augment
        )

    strong = (
        (
            "data.augment={crop: 0.1, flip: 0.0, erase: 0.2, mixup: 0.5, cutmix: 1.0,"
            " mix_probability: 0.5}"
        ),
    )
    assert fit(*strong) == Augment(crop_scale=0.35, flip=0.0, erase=0.2)
    assert fit("data.augment.crop_scale=0.6") == Augment(crop_scale=0.6)
    assert fit(*strong, "teacher.fit.augment={crop: 0.2, mixup: 0.3}") == Augment(
        crop_scale=0.2, mixup=0.3
    )
    description = describe(
        resolve(config.load(settings, ["teacher.fit.epochs=1", *strong]))
    )
    assert (
        "crop_scale 0.35, the student's 0.1; mixup 0.0, the student's 0.5; cutmix 0.0,"
        " the student's 1.0" in description
    )
    assert "the student's" not in describe(
        resolve(config.load(settings, ["teacher.fit.epochs=1"]))
    )
    for wrong, config_path in (
        ("{crp: 1}", "augment.crp"),
        ("3", "augment"),
        ("{crop: 2}", "augment.crop_scale"),
    ):
        with pytest.raises(ConfigErrors, match=rf"teacher\.fit\.{config_path}: "):
            fit(f"teacher.fit.augment={wrong}")
    with pytest.raises(ConfigError, match=r"^teacher\.fit\.augment\.policy: "):
        lines(settings, "teacher.fit={epochs: 1, augment: {policy: rand-x9}}")


def test_a_fit_evaluates_no_more_images_at_once_than_it_trains_on(settings):
    def batches(*overrides: str) -> int:
        plan = resolve(
            config.load(
                settings, ["teacher.fit.epochs=1", "data.batch_size=8", *overrides]
            )
        )
        data = plan.fits["teacher"].data
        return split_batch(data, 1, 36).eval_batch

    assert batches("data.eval_batch=500") == 8
    assert batches("data.eval_batch=500", "teacher.fit.batch_size=4") == 4
    assert batches("data.eval_batch=500", "data.micro_batch=2") == 2
    assert batches("data.eval_batch=3") == 3
    assert batches() == 8


@pytest.mark.parametrize(
    ("kind", "changes", "ranks", "message"),
    [
        (
            "cckd",
            {"micro_batch": 1},
            1,
            r"^data\.micro_batch: gives 'cckd' micro-batches of 1, .* 2 or more",
        ),
        (
            "cckd",
            {"eval_batch": 1},
            1,
            r"^data\.eval_batch: gives 'cckd' micro-batches of 1, .* 2 or more",
        ),
        (
            "cckd",
            {},
            8,
            (
                r"^data\.batch_size: gives 'cckd' micro-batches of 1, .* 2 or more on"
                r" each rank"
            ),
        ),
        (
            "dist",
            {"micro_batch": 2},
            1,
            r"^data\.micro_batch: gives 'dist' micro-batches of 2, .* 3 or more",
        ),
        (
            "dist",
            {},
            4,
            (
                r"^data\.batch_size: gives 'dist' micro-batches of 2, .* 3 or more on"
                r" each rank"
            ),
        ),
    ],
)
def test_a_loss_that_compares_images_needs_several_at_once(
    settings, monkeypatch, kind, changes, ranks, message
):
    """One image alone has a loss of 0 and agrees perfectly."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    settings["data"] |= {"batch_size": 8, **changes}
    enough = {
        "dist": ["data.micro_batch=0"],
        "cckd": ["data.micro_batch=2", "data.eval_batch=2"],
    }[kind]
    for losses in (
        f"[{{kind: {kind}}}]",
        f"[{{kind: kl}}, {{kind: {kind}, weight: 0.5}}]",
    ):
        with pytest.raises(ConfigError, match=message):
            check(resolve(config.load(settings, [f"losses={losses}"])))
    check(
        resolve(
            config.load(
                settings, [f"losses=[{{kind: kl}}, {{kind: {kind}, weight: 0.0}}]"]
            )
        )
    )
    monkeypatch.setenv("WORLD_SIZE", "1")
    check(resolve(config.load(settings, [f"losses=[{{kind: {kind}}}]", *enough])))


def test_a_fit_with_fewer_labels_than_its_batch_is_refused_under_its_own_key(settings):
    """`--check` found nothing, and the run said that the training split has 6
    images.
    """
    few_labels = ("teacher.fit.epochs=1", "data.labels=some", "data.labels_per_class=2")
    with pytest.raises(
        ConfigError,
        match=r"^teacher\.fit\.batch_size: is 8, .* 6 labelled images.*batch_size=6",
    ):
        lines(settings, *few_labels)
    assert lines(settings, *few_labels, "teacher.fit.batch_size=6")


@pytest.mark.parametrize(
    ("keys", "shares"),
    [
        ((), {}),
        (("teacher.cache.views=2",), {"teacher": 2 / 8}),
        (("data.views=2", "data.store=views"), {"data": 2 / 8}),
        (
            ("data.views=2", "data.store=ram"),
            {},
        ),  # still augmented after the first epoch, at the same cost
        (
            ("teacher.cache.views=2", "data.store=views", "run.steps=40"),
            {"teacher": 0.2, "data": 0.2},
        ),
    ],
)
def test_a_cache_or_store_is_full_when_each_view_has_been_seen(settings, keys, shares):
    """Eight epochs of 32 images, four steps each; 40 steps are ten epochs."""
    recipe = resolve(config.load(settings, ["run.epochs=8", *keys]))
    assert filling_ends(recipe, 32) == pytest.approx(
        {"teacher": 0.0, "data": 0.0} | shares
    )


@pytest.mark.parametrize(
    ("recorded", "keys", "steps", "patience"),
    [
        ({}, [], 100, 0),  # by a kd that recorded no length
        ({"labels_only": {"steps": 250, "patience": 7}}, ["run.patience=3"], 250, 7),
        (
            {"labels_only": {"steps": 250, "patience": 7}},
            ["run.baseline_steps=50", "run.patience=3"],
            50,
            0,
        ),
    ],
)
def test_the_baseline_is_evaluated_as_often_as_its_run(
    settings, tmp_path, recorded, keys, steps, patience
):
    folder = RunDir(tmp_path)
    evaluated = (40, 80, 100)
    folder.record(**recorded)
    for step in evaluated:
        folder.log("train", State(step=step), {})
        folder.log("val", State(step=step), {})
    baseline = resolve(config.load(settings, ["run.baseline=true", *keys])).baseline
    assert baseline is not None
    length = match_baseline_length(baseline, folder).length
    assert (length.steps, length.patience) == (steps, patience)
    assert -(-steps // length.every.evaluate) == 3  # the last step is evaluated too


def test_a_fit_of_another_crop_has_pixels_of_its_own(tmp_path):
    """The store keeps of an image what its smallest crop needs: a fit must not depend
    on the student's.
    """
    from pieces import base, paint

    root = tmp_path / "photos"
    paint(root / "train", (8, 8, 8), seed=1, size=96)
    paint(root / "val", (2, 2, 2), seed=2, size=96)
    identities = []
    for name, crop in (("weak", 0.35), ("strong", 0.05)):
        settings = base(root, tmp_path / name)
        keys = [
            "teacher.fit.epochs=1",
            "data.store=ram",
            f"data.augment.crop_scale={crop}",
        ]
        (folder,) = teach(config.load(settings, keys))
        rows = [
            json.loads(line)
            for line in (folder.parent / "metrics.jsonl").read_text().splitlines()
        ]
        identities.append(
            (
                folder.parent.name,
                [row["loss"] for row in rows if row["kind"] == "train"],
            )
        )
    assert identities[0] == identities[1]


def test_a_fit_has_its_own_seed_batch_and_views(settings, photos, tmp_path):
    """`teacher.fit.batch_size` and fresh views changed the folder's name alone."""
    from pieces import base

    settings = base(photos, tmp_path)

    def fit(*overrides: str) -> tuple[str, int, list]:
        (folder,) = teach(config.load(settings, ["teacher.fit.epochs=1", *overrides]))
        rows = [
            json.loads(line)
            for line in (folder.parent / "metrics.jsonl").read_text().splitlines()
        ]
        losses = [row["loss"] for row in rows if row["kind"] == "train"]
        return (
            folder.parent.name,
            json.loads((folder.parent / "manifest.json").read_text())["batch_size"],
            losses,
        )

    name, batch, losses = fit("run.seed=1")
    assert (batch, len(losses)) == (8, 2)
    assert fit("data.views=1", "run.seed=2") == (name, batch, losses)
    assert fit("teacher.fit.batch_size=4")[1] == 4
    assert (
        len(fit("teacher.fit.epochs=0", "teacher.fit.steps=3")[2]) == 2
    )  # at steps 2 and 3; it asked the network
    reseeded = fit("teacher.fit.seed=1")
    assert reseeded[0] != name
    assert reseeded[2] != losses


def test_the_configuration_in_a_run_folder_is_parsed_only_if_its_text_differs(
    tmp_path: Path,
):
    """A run that waits for a teacher opens its folder twice a second; parsing takes
    most of a second.
    """
    record = Record("a", tmp_path / "a", 2, (), "no: {configuration", {}, {})
    for _ in range(2):
        with open_run(record, 0):
            pass
    record = Record("a", tmp_path / "a", 2, (), "run: {}", {}, {})
    with pytest.raises(RunError, match="not the config of a run"), open_run(record, 0):
        pass

"""The same run in worlds of one, two and three processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pieces import Trained, slow
from ranks import STEPS, start
from waits import AT_POINTS, HOST

from kd.files.storage import read_rows

MICROS = "data.micro_batch=3"
TWO_RANKS = {
    "run:__call__",  # once a second: does a rank stop?
    *("checkpoint:crc32", "_optimizers:gather", "_optimizers:_unpack"),  # a checkpoint
}


def difference(
    first: dict[str, torch.Tensor],
    second: dict[str, torch.Tensor],
    prefix: str = "model.",
) -> float:
    """Return the largest difference of any weight."""
    names = [name for name in first if name.startswith(prefix)]
    assert names
    return max(
        (first[name].double() - second[name].double()).abs().max().item()
        for name in names
    )


SMALL = ("data.progressive.size=8", "data.progressive.until=0.5")


@pytest.mark.parametrize(
    "overrides", [pytest.param((), id="plain"), slow(SMALL, id="small images first")]
)
def test_two_ranks_of_two_micros_are_one_rank_of_four(plain, overrides):
    # SGD: an update is proportional to the gradient, so a sum in another order stays at
    # float32's rounding. AdamW divides by the gradient's size and turns the rounding
    # noise of parameters whose gradient is 0 in theory (the key bias of attention) into
    # whole steps; it is compared by its losses below.
    sgd = (
        MICROS,
        "optimizer.kind=sgd",
        "optimizer.lr=0.05",
        "student.args.drop_rate=0",
        *overrides,
    )
    alone = plain(1, *sgd)
    pair = plain(2, *sgd)
    assert "1 ranks x 4 micros x 3" in alone.world.logs[0]
    assert "2 ranks x 2 micros x 3" in pair.world.logs[0]
    steps = alone.ids(1, 4)
    assert len(steps) == STEPS
    assert steps == pair.ids(2, 2)
    assert len({id for step in steps for id in step}) == 36
    assert difference(alone.checkpoint(), pair.checkpoint()) < 1e-6
    assert difference(alone.checkpoint(), alone.checkpoint(5)) > 1e-2  # it did learn
    teacher_images = [
        [row["teacher_images"] for row in run.rows()] for run in (alone, pair)
    ]
    assert teacher_images == [[12.0] * STEPS] * 2  # the whole step's, not a rank's


@pytest.mark.slow
def test_the_loss_curve_does_not_depend_on_the_number_of_ranks(plain):
    adamw = (MICROS, "student.args.drop_rate=0")
    alone = plain(1, *adamw)
    pair = plain(2, *adamw)
    losses = [run.losses() for run in (alone, pair)]
    assert len(losses[0]) == STEPS
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    values = [run.rows("val")[-1] for run in (alone, pair)]
    assert values[0]["teacher_nll"] == pytest.approx(values[1]["teacher_nll"], rel=1e-6)
    assert values[0]["teacher_accuracy"] == values[1]["teacher_accuracy"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_compiled_student_learns_alike_on_two_ranks(config_file, tmp_path):
    """Its own forward is compiled, inside of DDP's wrapper: DDP's hooks and buckets
    stay as they are.
    """
    student = (
        "student={kind: torch, model: 'outside.small:build', args: {width: 8}, mean:"
        " [0, 0, 0], std: [1, 1, 1]}"
    )
    keys = ("run.steps=4", "optimizer.lr=0.05", "backend.timeout_seconds=600", student)
    env = {"KD_RECORD": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    losses = []
    for name, compile in (("eager", "off"), ("compiled", "on")):
        argv = [
            config_file,
            f"run.folder={tmp_path}",
            f"run.name={name}",
            *keys,
            f'student.compile="{compile}"',
        ]
        start("kd.cli.training:train", argv, 2, env, timeout=800).ended_well()
        losses.append(Trained(tmp_path / name).losses())
    modes = json.loads((tmp_path / "compiled" / "manifest.json").read_text())["modes"]
    assert modes["student"] == "fp32+unfused+compiled"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 4
    assert losses[0][-1] != pytest.approx(losses[0][0], rel=1e-3)


@pytest.mark.slow
def test_vectors_of_all_ranks_are_searched(plain):
    keys = (
        MICROS,
        "losses=[{kind: cosine}]",
        "student.args.drop_rate=0",
        "optimizer.kind=sgd",
        "optimizer.lr=0.05",
    )
    alone = plain(1, *keys)
    pair = plain(2, *keys)
    rows = [run.rows("val") for run in (alone, pair)]
    assert rows[0][-1]["knn"] > 0.5
    for mine, theirs in zip(*rows, strict=True):
        for name in ("agreement", "knn", "probe", "teacher_knn", "teacher_probe"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4), name


# with one patch most weights are of a convolution: the network then keeps channels last
# in memory
@pytest.mark.parametrize(
    ("ranks", "patch", "share"), [(2, 8, 1 / 2), slow(3, 8, 1 / 3), slow(2, 16, 0.71)]
)
def test_zero_is_adamw_to_the_last_bit(plain, ranks, patch, share):
    keys = (f"student.args.patch_size={patch}", "optimizer.ema_decay=0.9")
    adamw = plain(ranks, *keys)
    sharded = plain(ranks, *keys, "optimizer.zero=true")
    expected = adamw.checkpoint()
    tensors = sharded.checkpoint()
    assert expected.keys() == tensors.keys()
    assert {name.split(".")[0] for name in expected} == {
        "model",
        "average",
        "optimizer",
    }
    assert [
        name for name in expected if not torch.equal(expected[name], tensors[name])
    ] == []
    infos = [
        (run.folder / "checkpoints" / f"step_{STEPS:08d}" / "state.json").read_text()
        for run in (adamw, sharded)
    ]
    assert (
        infos[0].partition('"info"')[2].partition('"state"')[0]
        == infos[1].partition('"info"')[2].partition('"state"')[0]
    )
    mib = [run.rows("train")[-1]["optimizer_mib"] for run in (adamw, sharded)]
    assert mib[1] / mib[0] == pytest.approx(
        share, rel=0.35
    )  # whole tensors are dealt out, and these are few


@pytest.mark.slow
def test_frozen_layers_keep_their_bits_on_three_ranks(plain):
    """Weights and statistics of batch norm, of which a mean of three equal numbers
    would have other bits.
    """
    frozen = (
        "student.tuning={freeze: [patch_embed.*, blocks.0.*], freeze_epochs: 99,"
        " layer_decay: 0.75}"
    )
    norm = (
        "student.model=xcit_nano_12_p8_224",
        "student.args.cls_attn_layers=1",
        "student.args.depth=2",
    )
    run = plain(
        3,
        frozen,
        *norm,
        "optimizer.zero=true",
        "optimizer.ema_decay=0.9",
        "optimizer.weight_decay=0.5",
    )
    first = run.checkpoint(5)
    last = run.checkpoint()
    still = {
        n
        for n in first
        if n.startswith(
            tuple(f"{prefix}network." for prefix in ("model.student.", "average."))
        )
    }
    unlearned = {
        n for n in still if "network.patch_embed." in n or "network.blocks.0." in n
    }
    assert any(n.endswith("running_var") for n in unlearned)
    bits = [
        {n: tensors[n].flatten().view(torch.uint8) for n in still}
        for tensors in (first, last)
    ]
    assert [n for n in unlearned if not torch.equal(bits[0][n], bits[1][n])] == []
    assert {
        n
        for n in still - unlearned
        if "blocks.1." in n and not torch.equal(bits[0][n], bits[1][n])
    }
    untouched = run.folder / "checkpoints" / f"step_{STEPS:08d}" / "state.json"
    assert '"lr_scale"' in untouched.read_text()


@pytest.mark.parametrize("sifter", [slow("none"), "relative, sift_delay: 0"])
def test_two_ranks_wait_for_the_device_at_known_points_only(
    config_file, tmp_path, sifter
):
    keys = (
        f"run.folder={tmp_path}",
        "run.name=waits",
        f"sifter={{kind: {sifter}}}",
        "optimizer.zero=true",
    )
    world = start(
        "waits:train_two_ranks",
        [config_file, *keys],
        2,
        path=(Path(__file__).parents[1],),
    )
    world.ended_well()
    for log in world.logs:
        (line,) = (line for line in log.splitlines() if line.startswith("WAITED "))
        assert set(line.split()[1:]) - HOST <= AT_POINTS | TWO_RANKS


@pytest.mark.parametrize("store", ["disk", slow("ram")])
def test_two_ranks_fill_one_store_of_decoded_pixels_and_train_as_without(
    plain, train, store
):
    """The photos are not larger than training needs, so that a store changes
    no pixel.
    """
    with_store = train(f"stored-{store}", 2, f"data.store={store}", "data.workers=1")
    with_store.world.ended_well()
    expected = plain(2).checkpoint()
    tensors = with_store.checkpoint()
    assert [
        name for name in expected if not torch.equal(expected[name], tensors[name])
    ] == []
    assert with_store.world.logs[0].count("store: about 0.2 MiB of decoded images") == 1
    assert "store: " not in with_store.world.logs[1]
    assert ("in memory of each rank" in with_store.world.logs[0]) == (store == "ram")


def test_each_rank_leaves_its_timeline(plain):
    run = plain(2)
    assert sorted(path.name for path in run.folder.glob("timeline_*")) == [
        "timeline_0.jsonl",
        "timeline_1.jsonl",
    ]
    for rank in range(2):
        rows = read_rows(run.folder / f"timeline_{rank}.jsonl")
        assert sum(row["steps"] for row in rows) == STEPS
        for row in rows:
            assert sum(row["ms"].values()) == pytest.approx(row["wall_ms"], abs=0.02)
        assert sum(row["ms"].get("communication", 0.0) for row in rows) > 0
    assert isinstance(json.loads((run.folder / "findings.json").read_text()), list)
    assert "where the time of 20 steps went" in run.world.logs[0]
    assert "where the time" not in run.world.logs[1]
    assert all(
        {"ms_communication", "ms_wait"} <= row.keys() for row in run.rows("train")[2:]
    )


PARTLY = (
    "student={kind: torch, model: 'outside.small:partly', mean: [0, 0, 0], std: [1,"
    " 1, 1]}"
)


def test_layers_without_a_gradient_train_alike_on_two_ranks(plain):
    """DDP waited for their gradients: it ended the run with their numbers."""
    keys = (MICROS, "run.steps=4", "optimizer.kind=sgd", "optimizer.lr=0.05", PARTLY)
    alone = plain(1, *keys)
    pair = plain(2, *keys)
    for run in (alone, pair):
        assert "no gradient reaches pooler.weight, pooler.bias" in run.world.logs[0]
    assert difference(alone.checkpoint(), pair.checkpoint()) < 1e-6
    assert difference(alone.checkpoint(), alone.checkpoint(4)) == 0
    assert alone.losses()[-1] < alone.losses()[0]


def test_a_layer_that_is_skipped_later_is_named(train):
    run = train(
        "skipped",
        2,
        MICROS,
        "run.steps=12",
        PARTLY.replace("mean", "args: {sometimes: true}, mean"),
    )
    assert set(run.world.codes) == {2}
    for log in run.world.logs:
        assert "no gradient reached extra.weight, extra.bias" in log
        assert "Traceback" not in log

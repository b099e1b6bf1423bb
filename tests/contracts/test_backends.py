"""One suite for every backend. A backend that this machine lacks is skipped with its
error message.

`smddp` and `neuron` run on strict stand-ins of their libraries (`smddp_stand_in/`,
`neuron_stand_in/`), never on the libraries themselves.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "distributed"))

from ranks import start  # noqa: E402

from kd.parts import registry  # noqa: E402

CANNOT = 77
STAND_INS: dict[str, tuple[str, dict[str, str], Path]] = {
    "smddp": ("smddp", {"device": "cpu"}, HERE / "smddp_stand_in"),
    "neuron": ("torch_neuronx.on_cpu", {}, HERE / "neuron_stand_in"),
}
"""The part that runs, its options, and the folder of the stand-in."""
# smddp supports these, by its documentation and by reports; everything else raises in
# the stand-in
ALLOWED = {"allreduce", "broadcast", "allgather"}


@pytest.fixture(scope="module", params=registry.names("backends"))
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp(kind)


@pytest.fixture(scope="module")
def perform(kind, folder) -> Callable[[str, int], list[dict[str, Any]]]:
    """Run a task in a world, once, and return the results of its ranks; skip where this
    machine cannot.
    """
    facts: dict[tuple[str, int], list[dict[str, Any]]] = {}
    backend, options, path = STAND_INS.get(kind, (kind, {}, HERE))

    def run(task: str, ranks: int) -> list[dict[str, Any]]:
        if (task, ranks) not in facts:
            argv = [backend, json.dumps(options), folder, task]
            world = start("conformance:main", argv, ranks, path=(HERE, path))
            if CANNOT in world.codes:
                pytest.skip(world.logs[world.codes.index(CANNOT)].strip())
            survivors = range(ranks - 1) if task == "lose" else range(ranks)
            assert all(world.codes[rank] == 0 for rank in survivors), "\n".join(
                world.logs
            )
            files = [folder / f"{task}_{ranks}_{rank}.json" for rank in survivors]
            facts[task, ranks] = [json.loads(file.read_text()) for file in files]
        return facts[task, ranks]

    return run


def weights(
    folder: Path, ranks: int, name: str, section: str = "model", task: str = "train"
) -> dict[str, torch.Tensor]:
    """Return the tensors that rank 0 saved under a name."""
    tensors = load_file(folder / f"{task}_{ranks}.safetensors")
    prefix = f"{section}/{name}/"
    return {
        key.removeprefix(prefix): value
        for key, value in tensors.items()
        if key.startswith(prefix)
    }


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return (
        bool(first)
        and first.keys() == second.keys()
        and all(torch.equal(first[key], second[key]) for key in first)
    )


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max((first[key] - second[key]).abs().max().item() for key in first)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_world_is_whole(perform, ranks):
    for rank, facts in enumerate(perform("train", ranks)):
        assert (facts["rank"], facts["world_size"], facts["sum"]) == (
            rank,
            ranks,
            ranks,
        )
        assert facts["mean"] == pytest.approx([(ranks - 1) / 2] * 3)
        assert facts["broadcast"] == [5.0, 5.0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_steps_are_ddp_and_adamw_to_the_last_bit(perform, folder, ranks):
    facts = perform("train", ranks)
    assert same(weights(folder, ranks, "plain"), weights(folder, ranks, "hand"))
    if "zero" in facts[0]["digests"]:
        assert same(weights(folder, ranks, "zero"), weights(folder, ranks, "hand"))
        assert same(
            weights(folder, ranks, "zero", "state"),
            weights(folder, ranks, "plain", "state"),
        )
    for name in facts[0]["digests"]:
        assert len({rank["digests"][name] for rank in facts}) == 1, (
            f"ranks differ after '{name}'"
        )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_micro_batches_and_ranks_make_one_batch(perform, folder, ranks):
    perform("train", ranks)
    perform("train", 1)
    alone = weights(folder, 1, "sgd")
    # SGD, whose steps are the gradients: the order of sums differs, so float32 rounding
    # does
    assert distance(weights(folder, ranks, "sgd"), alone) < 1e-6
    assert distance(weights(folder, ranks, "sgd, two micros"), alone) < 1e-6
    assert (
        distance(weights(folder, ranks, "two micros"), weights(folder, 1, "plain"))
        < 1e-4
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_zero_shards_the_state_and_rank_0_gathers_it(perform, ranks):
    facts = perform("train", ranks)
    if "zero" not in facts[0]["state_is_empty"]:
        pytest.skip("this backend refuses ZeRO")
    assert [rank["state_is_empty"]["zero"] for rank in facts] == [False] + [True] * (
        ranks - 1
    )
    whole_mib = facts[0]["whole_mib"]
    assert sum(rank["mib"] for rank in facts) == pytest.approx(whole_mib)
    # of 1,476 parameters 1,024 are one matrix, which is not cut
    assert max(rank["mib"] for rank in facts) < 0.75 * whole_mib


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_state_goes_on_in_another_world(perform, folder, ranks):
    name = "zero" if "zero" in perform("train", 2)[0]["digests"] else "plain"
    facts = perform("resume", ranks)
    assert same(
        weights(folder, ranks, name, "state", "resume"),
        weights(folder, 2, name, "state"),
    )
    assert len({rank["digest"] for rank in facts}) == 1
    assert facts[0]["lr"] == [1e-2, 1e-2]
    perform("resume", 2)
    assert (
        distance(
            weights(folder, ranks, name, task="resume"),
            weights(folder, 2, name, task="resume"),
        )
        < 1e-5
    )
    assert (
        distance(weights(folder, ranks, name, task="resume"), weights(folder, 2, name))
        > 1e-3
    )  # one more step


def test_a_lost_rank_is_reported_when_its_connection_ends(perform):
    for facts in perform("lose", 3):
        assert facts["kind"] == "BackendError", facts
        assert "lost the other ranks" in facts["text"]
        assert (
            "Timed out" not in facts["text"]
        )  # as soon as it is lost, not at the deadline
        assert facts["foreign"] is None


def test_the_collectives_are_within_the_allowed_set(kind, perform):
    if kind not in STAND_INS:
        pytest.skip("only the stand-ins count collectives")
    for task in ("train", "resume"):
        for facts in perform(task, 3):
            assert set(facts["operations"]) <= ALLOWED
            assert facts["operations"]["allreduce"] > 0
            assert facts["operations"]["broadcast"] > 0


def test_a_second_training_brings_no_new_shape_to_a_compiling_device(kind, perform):
    if kind != "neuron":
        pytest.skip("only the stand-in of a compiling device notes shapes")
    assert [facts["compiled_again"] for facts in perform("train", 3)] == [[], [], []]


def test_the_stand_in_refuses_what_the_library_refuses(tmp_path):
    for operation in ("new_group", "ReduceOp", "reduce_scatter", "barrier"):
        world = start(
            "refusals:main", [operation], 2, path=(HERE, STAND_INS["smddp"][2])
        )
        assert world.codes == [0, 0], operation + "\n" + "\n".join(world.logs)

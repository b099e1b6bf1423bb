"""Averaged weights."""

import pytest
import torch
from torch import nn

from kd.engine.optim import EMA


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def change(module: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor))


@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_the_average_follows_its_formula(decay):
    module = network()
    average = EMA(module, decay)
    expected = {
        n: t.double().clone()
        for n, t in module.state_dict().items()
        if t.is_floating_point()
    }
    for step in range(1, 30):
        change(module, step)
        average.update(step)
        share = min(decay, (1 + step) / (10 + step))
        for name, tensor in module.state_dict().items():
            if name in expected:
                expected[name] = share * expected[name] + (1 - share) * tensor.double()
    assert (
        average.average.keys()
        == expected.keys()
        == {
            "0.weight",
            "0.bias",
            *(
                f"1.{name}"
                for name in ("weight", "bias", "running_mean", "running_var")
            ),
        }
    )
    for name, tensor in average.average.items():
        torch.testing.assert_close(
            tensor.double(), expected[name], rtol=1e-5, atol=1e-5
        )


def test_tied_weights_are_averaged_once_under_both_names():
    module = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)
    )
    module[2].weight = module[0].weight
    module[3].running_mean = module[1].running_mean
    average = EMA(module, 0.5)
    first = module[0].weight.detach().clone()
    change(module, 1)
    average.update(100)
    expected = (first + module[0].weight.detach()) / 2
    assert average.average.keys() == {
        name for name, t in module.state_dict().items() if t.is_floating_point()
    }
    for name in ("0.weight", "2.weight"):
        torch.testing.assert_close(average.average[name], expected)
    assert average.average["1.running_mean"] is average.average["3.running_mean"]
    average.apply()
    torch.testing.assert_close(module[2].weight.detach(), expected)


def test_applied_swaps_and_restores():
    module = network()
    average = EMA(module, 0.9)
    change(module, 1)
    trained = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def evaluation_that_fails() -> None:  # the weights must be restored all the same
        with average.applied():
            assert all(
                torch.equal(module.state_dict()[n], t)
                for n, t in average.average.items()
            )
            assert not torch.equal(module.state_dict()["0.weight"], trained["0.weight"])
            raise KeyError

    with pytest.raises(KeyError):
        evaluation_that_fails()
    assert all(
        torch.equal(module.state_dict()[name], tensor)
        for name, tensor in trained.items()
    )


def test_apply_is_permanent():
    module = network()
    average = EMA(module, 0.9)
    change(module, 1)
    average.apply()
    assert all(
        torch.equal(module.state_dict()[n], t) for n, t in average.average.items()
    )

"""Train on all devices of one process, then again from the middle; print what differs and how a batch was divided."""

import json
import shutil
import sys
from pathlib import Path

import torch
import torch_xla
from safetensors.torch import load_file

from kd import parts
from kd.cli.training import train as main


def train(config: str, folder: str) -> None:
    argv = [config, "backend.kind=xla", "backend.spmd=true", "optimizer.clip=1", f"run.folder={folder}", "run.name=run"]
    assert main(argv) == 0
    last = Path(folder) / "run" / "checkpoints" / "step_00000020"
    kept = load_file(last / "tensors.safetensors")
    shutil.rmtree(last)
    assert main(argv) == 0
    again = load_file(last / "tensors.safetensors")
    differing = [name for name in kept if not torch.equal(kept[name], again[name])]

    module = parts.find("backends", "xla", "test")
    backend = module.build(module.Options(spmd=True), precision="fp32", timeout_seconds=5.0)
    backend.setup()
    divided = backend._divided(torch.ones(4, 3, device=backend.device))
    sharding = torch_xla._XLAC._get_xla_sharding_spec(divided)
    print(json.dumps({"sharding": sharding, "resumed_differs": differing}), flush=True)


if __name__ == "__main__":
    train(*sys.argv[1:])

"""Print the graph of one optimizer step in a world of two replicas; nothing is
executed, which a CPU could not.
"""

import os
import sys

os.environ["CPU_NUM_DEVICES"] = "2"

import torch
import torch_xla

from kd.parts import registry


def main(kind: str) -> None:
    torch_xla._XLAC._xla_set_replication_devices(
        ["CPU:0", "CPU:1"]
    )  # before torch_xla first counts its world
    module = registry.find("backends", "xla", "test")
    backend = module.build(module.Options(), precision="fp32", timeout_seconds=5.0)
    backend.device = torch_xla.device()
    layer = torch.nn.Linear(4, 3).to(backend.device)
    groups = [{"params": list(layer.parameters())}]
    optimizer = backend.optimizer(groups, torch.optim.AdamW, kind == "zero", lr=0.1)
    layer(torch.ones(2, 4, device=backend.device)).square().sum().backward()
    norm = backend.step(optimizer, 0.0 if kind == "plain" else 1.0)
    print(torch_xla._XLAC._get_xla_tensors_hlo([*layer.parameters(), norm]), flush=True)
    os._exit(0)  # the runtime would wait for the second replica


if __name__ == "__main__":
    main(sys.argv[1])

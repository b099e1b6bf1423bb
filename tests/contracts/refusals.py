"""Call one operation of the stand-in for smddp that the real library does not
support.
"""

import importlib

import torch
import torch.distributed as dist


def main(argv: list[str]) -> int:
    importlib.import_module("smdistributed.dataparallel.torch.torch_smddp")
    dist.init_process_group("smddp")
    assert dist.get_backend() == "smddp"
    tensor = torch.ones(2)
    operation = {
        "new_group": lambda: dist.new_group([0, 1]),
        "ReduceOp": lambda: dist.all_reduce(tensor, op=dist.ReduceOp.AVG),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(1), tensor),
        "barrier": lambda: dist.barrier(device_ids=[0]),
    }[argv[0]]
    code = 4
    try:
        operation()
    except RuntimeError as error:
        print(error)
        code = 0 if "SMDDP does not support" in str(error) else 3
    dist.all_reduce(
        tensor
    )  # rank 0 holds the store: it must not exit before the others have arrived
    return code

"""Imports torch, timm and kd once, then forks a real process for every rank that a test
asks for.

The import costs seconds a process, the fork milliseconds. Each rank is an ordinary
process with a launcher's variables, which may be killed. One JSON request a line on
stdin, one JSON answer a line on stdout.
"""

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback

HEAVY = (
    "torch timm torch.distributed.optim torch.nn.parallel kd.jobs.train kd.setup.build"
    " kd.parts.backends.cpu"
)
for heavy in (*HEAVY.split(), "kd.parts.networks.timm", "kd.cli.training"):
    importlib.import_module(heavy)
sys.modules["kd.config"].load("vit_food")  # with the parsers that it imports
gc.freeze()  # the ranks share these pages, and no collection passes over them


def become(rank: dict) -> None:
    """Be one rank: its environment, its log, its function; never return."""
    code = 1
    try:
        log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(rank["env"])
        sys.path[:0] = rank["path"]
        sys.argv = ["kd", *rank["argv"]]
        module, _, function = rank["target"].partition(":")
        code = getattr(importlib.import_module(module), function)(rank["argv"]) or 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def world(request: dict) -> dict:
    """Fork the ranks, wait for them, kill those that outlast the deadline; codes are
    negative signals as usual.
    """
    start = time.monotonic()
    running = {}
    for number, rank in enumerate(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            become(rank)
        running[pid] = number
    codes = [0] * len(running)
    seconds = [0.0] * len(running)
    expired = False
    while running:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                number = running.pop(pid)
                codes[number] = os.waitstatus_to_exitcode(status)
                seconds[number] = time.monotonic() - start
        if running and not expired and time.monotonic() - start > request["timeout"]:
            expired = True
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return {"codes": codes, "seconds": seconds, "expired": expired}


if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(world(json.loads(line))), flush=True)

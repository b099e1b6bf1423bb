"""The Ray cluster that the variable RAY_ADDRESS names. Ray is an extra: import this file only where it is asked for."""

from __future__ import annotations

import os
import signal
import threading

import ray
from ray.exceptions import RayError

from kd.errors import RunError


def connect(where: str) -> None:
    """Connect this process to the cluster, once.

    Raises:
        RunError: there is none; `where` is the config path of the message.
    """
    if ray.is_initialized():
        return
    address, remedy = os.environ["RAY_ADDRESS"], "Start with kd-launch, or see docs/cluster.md"
    # Ray puts its own handler in the place of ours, which writes a checkpoint.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, namespace="kd", log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(where, f"there is no Ray cluster at RAY_ADDRESS={address} ({reason})", "", remedy) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)

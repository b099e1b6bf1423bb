"""Connect to the Ray cluster at RAY_ADDRESS.

Ray is an extra: import this file only if it is needed.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping

import ray
from PIL import features
from ray.exceptions import RayError

from kd.core.errors import RunError, first_sentence
from kd.core.host import package_versions


def connect(config_path: str) -> None:
    """Connect this process to the cluster, once."""
    if ray.is_initialized():
        return
    address = os.environ["RAY_ADDRESS"]
    # Ray replaces kd's handler, which writes a checkpoint.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, namespace="kd", log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        wrong = (
            f"there is no Ray cluster at RAY_ADDRESS={address}"
            f" ({first_sentence(error)})"
        )
        remedy = "Start with kd-launch, or see docs/scale.md"
        raise RunError(config_path, wrong, "", remedy) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def joined_hosts(total: int, seconds: float) -> int:
    """Wait at most some seconds for all hosts; return how many have joined."""
    connect("backend")
    deadline = time.monotonic() + seconds
    joined = _num_alive()
    while joined < total and time.monotonic() < deadline:
        time.sleep(0.5)
        joined = _num_alive()
    ray.shutdown()
    return joined


def _num_alive() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def decoding_versions(*packages: str) -> dict[str, str]:
    """Return the versions of this host's decoders and of further packages."""
    libraries = ["jpg", "libjpeg_turbo", "webp", "zlib"]
    if "avif" in features.modules:
        libraries.append("avif")
    decoders = {name: features.version(name) or "" for name in libraries}
    return (
        package_versions("kd", *packages, "numpy", "pillow", "pillow-heif") | decoders
    )


def check_versions(
    config_path: str, address: str, theirs: Mapping[str, str], ours: Mapping[str, str]
) -> None:
    """Refuse a host with other versions than this one."""
    different = [
        f"{name} {theirs.get(name)} (here {ours[name]})"
        for name in ours
        if theirs.get(name) != ours[name]
    ]
    if different:
        wrong = f"the host {address} decodes with {', '.join(different)}"
        remedy = "Install the same packages on all hosts, or use one image for all"
        raise RunError(config_path, wrong, "", remedy)

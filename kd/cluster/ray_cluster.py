"""The Ray cluster at RAY_ADDRESS. Ray is an extra: import this file only if it is
needed.
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
    address, remedy = (
        os.environ["RAY_ADDRESS"],
        "Start with kd-launch, or see docs/scale.md",
    )
    # Ray replaces kd's handler, which writes a checkpoint.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, namespace="kd", log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        reason = first_sentence(error)
        raise RunError(
            config_path,
            f"there is no Ray cluster at RAY_ADDRESS={address} ({reason})",
            "",
            remedy,
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def joined_hosts(wanted: int, seconds: float) -> int:
    """Wait until the cluster has the wanted number of hosts or the time is over; return
    its number of hosts.
    """
    connect("backend")
    deadline = time.monotonic() + seconds
    while (
        joined := sum(node["Alive"] for node in ray.nodes())
    ) < wanted and time.monotonic() < deadline:
        time.sleep(0.5)
    ray.shutdown()
    return joined


def decoding_versions(*packages: str) -> dict[str, str]:
    """Return the versions of this host's decoding packages and libraries, and of
    `packages`.
    """
    libraries = [
        "jpg",
        "libjpeg_turbo",
        "webp",
        "zlib",
        *(["avif"] if "avif" in features.modules else []),
    ]
    decoders = {name: features.version(name) or "" for name in libraries}
    return (
        package_versions("kd", *packages, "numpy", "pillow", "pillow-heif") | decoders
    )


def check_versions(
    config_path: str, address: str, theirs: Mapping[str, str], ours: Mapping[str, str]
) -> None:
    """Refuse a host with other versions than this one."""
    if other := [
        f"{name} {theirs.get(name)} (here {ours[name]})"
        for name in ours
        if theirs.get(name) != ours[name]
    ]:
        remedy = "Install the same packages on all hosts, or use one image for all"
        raise RunError(
            config_path,
            f"the host {address} decodes with {', '.join(other)}",
            "",
            remedy,
        )

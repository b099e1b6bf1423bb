"""`kd-predict --ray`: rows from all hosts of a Ray cluster, the same as from this machine alone.

Ray places the calls, and makes those of a lost host elsewhere. Each process of a host loads the model once.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from kd.cluster.ray_cluster import check_versions, connect, decoding_versions
from kd.core.errors import ConfigError, KdError, RunError
from kd.deploy.predict.image_list import ImageList
from kd.deploy.predict.rows import Predictor, Row, in_order
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.model import Description, load, read_verified

WHERE = "--ray"
RUNTIMES = ("onnxruntime", "openvino")
CHUNK = 32  # images of a call
AHEAD = 3  # calls under way for each CPU of the cluster


@dataclass(frozen=True, slots=True)
class PredictionJob:
    """What a host must know. The export travels with it, the images do not: their paths or URLs hold on all hosts."""

    images: ImageList
    description: Description
    graph: Mapping[str, bytes]  # the files of the graph
    limits: Limits
    top: int
    second: PredictionJob | None = None  # with the model that is asked where the first is not sure

    @staticmethod
    def of(description: Description, images: ImageList, limits: Limits, top: int) -> PredictionJob:
        """Read the graph; `load` compares it with the manifest again where it is used."""
        names = [description.file, *([f"{description.file[:-4]}.bin"] if description.file.endswith(".xml") else [])]
        graph = {name: read_verified(description.folder, name, description.files) for name in names}
        return PredictionJob(images, description, graph, limits, top)

    def predictor(self) -> Predictor:
        with tempfile.TemporaryDirectory(prefix="kd-predict-") as folder:
            for name, content in self.graph.items():
                Path(folder, name).write_bytes(content)
            model = load(replace(self.description, folder=Path(folder)), threads=1, slots=1)
        model.warm_up(1)
        return Predictor(self.images, model, self.limits, self.top, self.second.predictor() if self.second else None)


class HostRows(NamedTuple):
    """What a host answers to a call."""

    host: str  # Ray's id of it
    address: str
    versions: Mapping[str, str]
    rows: list[Row] | KdError


_loaded: dict[Any, Predictor] = {}  # the predictor of this process of a host, by the reference to its job


def _answer(job: list[Any], ids: range) -> HostRows:
    """Classify some images: the function that Ray calls on a host. The job comes as a reference, which is read once."""
    context = ray.get_runtime_context()
    try:
        if job[0] not in _loaded:
            _loaded.clear()
            wanted: Any = ray.get(job[0])
            _loaded[job[0]] = wanted.predictor()
        predictor = _loaded[job[0]]
        with ThreadPoolExecutor(len(ids)) as readers:
            remote = predictor.images.remote
            contents = [readers.submit(predictor.images.content, id) for id in ids] if remote else []
            rows: list[Row] | KdError = predictor.rows(ids, contents)
    except KdError as error:
        rows = error
    return HostRows(context.get_node_id(), ray.util.get_node_ip_address(), decoding_versions(*RUNTIMES), rows)


def by_hosts(job: PredictionJob, hosts: set[str], start: int) -> Iterator[list[Row]]:
    """Yield the rows of all images from `start` on, in order; add the hosts that have helped to `hosts`."""
    if not os.environ.get("RAY_ADDRESS"):
        remedy = "Start one with `ray start --head`, or see docs/scale.md"
        raise ConfigError(WHERE, "the variable RAY_ADDRESS names no cluster", "HOST:PORT", remedy)
    connect(WHERE)
    reference, ours = ray.put(job), decoding_versions(*RUNTIMES)
    call = ray.remote(_answer).options(num_cpus=1, scheduling_strategy="SPREAD")

    def submit(ids: range) -> Future[HostRows]:
        return call.remote([reference], ids).future()

    def ahead() -> int:
        return max(1, AHEAD * int(ray.cluster_resources().get("CPU", 0)))

    try:
        for answer in in_order(range(start, len(job.images.names)), CHUNK, submit, ahead):
            check_versions(WHERE, answer.address, answer.versions, ours)
            if isinstance(error := answer.rows, KdError):
                allowed = "All hosts read the images by the same paths or URLs, and have the same packages"
                raise type(error)(WHERE, f"on the host {answer.address}: {error.wrong}", allowed, error.remedy)
            hosts.add(answer.host)
            yield answer.rows
    except RayError as error:
        reason = str(error).strip().splitlines()[-1][:200]
        remedy = "Install the same packages on all hosts, or use one image for all"
        raise RunError(WHERE, f"a host of the cluster fails ({reason})", "The same kd on all hosts", remedy) from error

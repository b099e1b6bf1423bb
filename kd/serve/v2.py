"""KServe's Open Inference Protocol, version 2, over HTTP: health, metadata and inference on tensors."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kd.serve.answers import independent_probabilities
from kd.serve.bodies import SPARE_VALUES, parse_json
from kd.serve.model import Model
from kd.serve.problems import Problem, busy
from kd.serve.request_body import request_body
from kd.serve.service import Service

Handler = Callable[[Request], Awaitable[Response]]
MAX_ID = 256
PRESENT = "present"
"""The second output, where an image may have several labels: which of them exceed their thresholds."""


class Protocol:
    """The handlers of one service."""

    def __init__(self, service: Service) -> None:
        self.service, self.description = service, service.description

    def routes(self, observed: Callable[[Handler], Handler]) -> list[Route]:
        """Return the routes. `observed` wraps the handler of inference, to count and log it."""
        routes = [Route("/v2", self.server), Route("/v2/health/live", self.live), Route("/v2/health/ready", self.ready)]
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes += [Route(path, self.metadata), Route(f"{path}/ready", self.ready)]
            routes.append(Route(f"{path}/infer", observed(self.infer), methods=["POST"]))
        return routes

    async def server(self, request: Request) -> Response:
        """Return the server's name and version."""
        return JSONResponse({"name": "kd-serve", "version": self.description.version, "extensions": []})

    async def live(self, request: Request) -> Response:
        """Answer 200 while the process runs."""
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        """Answer 200 if the model is loaded and the server is not shutting down, else 503."""
        if "model" in request.path_params:
            self._check_names(request)
        if not self.service.ready:
            raise busy("The model is not ready.")
        return JSONResponse({"name": self.description.name, "ready": True})

    async def metadata(self, request: Request) -> Response:
        """Describe the model's tensors."""
        self._check_names(request)
        description = self.description
        image = {"name": "image", "datatype": "UINT8", "shape": [-1, 3, description.size, description.size]}
        shape = [-1, description.output.width]
        outputs = [{"name": description.output.name, "datatype": "FP32", "shape": shape}]
        if description.output.thresholds:
            outputs.append({"name": PRESENT, "datatype": "BOOL", "shape": shape})
        return JSONResponse(
            {
                "name": description.name,
                "versions": [description.version],
                "platform": "openvino_ir" if description.file.endswith(".xml") else "onnxruntime_onnx",
                "inputs": [image],
                "outputs": outputs,
            }
        )

    async def infer(self, request: Request) -> Response:
        """Return the logits, or the embeddings, of uint8 images; where an image may have several labels, also which."""
        self._check_names(request)
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Problem(415, "Tensors are sent as application/json.", {"accept": "application/json"})
        async with request_body(request, self.service) as body:
            answer = await self.service.run(lambda model: _infer(self.service, model, body), request.receive)
        return Response(answer, media_type="application/json")

    def _check_names(self, request: Request) -> None:
        model, version = request.path_params["model"], request.path_params.get("version", self.description.version)
        if (model, version) != (self.description.name, self.description.version):
            raise Problem(404, "There is no such model or version here.")


def _infer(service: Service, model: Model, body: bytes) -> bytes:
    start = time.perf_counter()
    content = parse_json(body, _values(model.size, service.limits.max_images))
    names = (model.output.name, PRESENT) if model.output.thresholds else (model.output.name,)
    pixels, requested = _tensor(content, model.size, names, service.limits.max_images)
    identity = _identity(content)
    values = np.concatenate([model.engine(image[None]) for image in pixels])
    service.metrics.stage("infer", time.perf_counter() - start)
    service.metrics.images(len(pixels))
    outputs = []
    if model.output.name in requested:
        outputs.append(_output(model.output.name, "FP32", values))
    if PRESENT in requested:
        outputs.append(
            _output(PRESENT, "BOOL", independent_probabilities(values) > np.asarray(model.output.thresholds))
        )
    answer: dict[str, Any] = {"model_name": model.name, "model_version": model.version, "outputs": outputs}
    if identity is not None:
        answer["id"] = identity
    return json.dumps(answer).encode()  # ASCII: an `id` with a lone surrogate cannot be encoded as UTF-8


def _output(name: str, datatype: str, values: np.ndarray) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(values.shape), "data": values.ravel().tolist()}


def _values(size: int, max_images: int) -> int:
    """Return the largest number of JSON values in a request: numbers, rows, channels and images."""
    return max_images * (3 * size * size + 3 * size + 4) + SPARE_VALUES


def _identity(content: dict[str, Any]) -> str | None:
    """Return the `id` of the request, which the answer repeats, or None."""
    identity = content.get("id")
    if identity is not None and not (isinstance(identity, str) and len(identity) <= MAX_ID):
        raise Problem(400, f"`id` must be a string of up to {MAX_ID} characters.")
    return identity


def _flat(data: Any, shape: list[int]) -> np.ndarray:
    """Return nested or flat lists of whole numbers as uint8 [B, 3, S, S].

    Lengths and types are checked before numpy, which would store every string at the width of the longest.

    Raises:
        ValueError: other lengths or types, or a number outside 0..255.
    """
    count = math.prod(shape)
    values = data
    if not isinstance(values, list):
        raise ValueError
    if len(values) != count:
        if len(values) != shape[0]:
            raise ValueError
        for length in shape[1:]:
            if any(type(inner) is not list or len(inner) != length for inner in values):
                raise ValueError
            values = list(itertools.chain.from_iterable(values))
    if set(map(type, values)) != {int}:  # excludes bool, a subclass of int
        raise ValueError
    return np.frombuffer(bytearray(values), np.uint8).reshape(shape)


def _tensor(content: Any, size: int, outputs: Sequence[str], max_images: int) -> tuple[np.ndarray, Sequence[str]]:
    """Return the one input of a request, uint8 [B, 3, S, S], and the names of the requested outputs.

    Raises:
        Problem: 400, 413.
    """
    inputs = content.get("inputs") if isinstance(content, dict) else None
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise Problem(400, "`inputs` must be a list of one tensor.")
    tensor: dict[str, Any] = inputs[0]
    shape: Any = tensor.get("shape")
    if (tensor.get("name"), tensor.get("datatype")) != ("image", "UINT8"):
        raise Problem(400, "The input must be called `image` and have the datatype UINT8.")
    integers = isinstance(shape, list) and len(shape) == 4 and all(type(n) is int for n in shape)
    if not integers or shape[1:] != [3, size, size] or shape[0] < 1:
        raise Problem(400, f"The shape must be [images, 3, {size}, {size}].")
    if shape[0] > max_images:
        raise Problem(413, f"There are more than {max_images} images in the request.")
    requested = content.get("outputs") or []
    if not isinstance(requested, list) or any(
        not isinstance(o, dict) or o.get("name") not in outputs for o in requested
    ):
        only = f"The only output is `{outputs[0]}`." if len(outputs) == 1 else f"The outputs are {', '.join(outputs)}."
        raise Problem(400, only)
    try:
        return _flat(tensor.get("data"), shape), [output["name"] for output in requested] or outputs
    except ValueError as error:
        raise Problem(400, "`data` must hold whole numbers from 0 to 255, as many as the shape says.") from error

"""KServe's Open Inference Protocol, version 2, over HTTP: health, metadata, and tensors in, tensors out."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kd.serve.bodies import parse_json
from kd.serve.intake import Intake
from kd.serve.model import Model
from kd.serve.problems import Problem, busy
from kd.serve.service import Service

Handler = Callable[[Request], Awaitable[Response]]


class Protocol:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self.service, self.told = service, service.told

    def routes(self, observed: Callable[[Handler], Handler]) -> list[Route]:
        """Return the routes; `observed` wraps the handler that costs something."""
        found = [
            Route("/v2", self.server),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
        ]
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            found += [
                Route(path, self.metadata),
                Route(f"{path}/ready", self.ready),
                Route(f"{path}/infer", observed(self.infer), methods=["POST"]),
            ]
        return found

    async def server(self, request: Request) -> Response:
        """Say what this server is."""
        return JSONResponse({"name": "kd-serve", "version": self.told.version, "extensions": []})

    async def live(self, request: Request) -> Response:
        """Answer as long as the process can."""
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        """Say whether the model answers."""
        if "model" in request.path_params:
            self._check_names(request)
        if not self.service.ready:
            raise busy("The model is not ready.")
        return JSONResponse({"name": self.told.name, "ready": True})

    async def metadata(self, request: Request) -> Response:
        """Describe the model's tensors."""
        self._check_names(request)
        told = self.told
        image = {"name": "image", "datatype": "UINT8", "shape": [-1, 3, told.size, told.size]}
        logits = {"name": "logits", "datatype": "FP32", "shape": [-1, len(told.labels)]}
        platform = "openvino_ir" if told.file.endswith(".xml") else "onnxruntime_onnx"
        facts = {"name": told.name, "versions": [told.version], "platform": platform}
        return JSONResponse({**facts, "inputs": [image], "outputs": [logits]})

    async def infer(self, request: Request) -> Response:
        """Answer with the logits of uint8 images."""
        self._check_names(request)
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Problem(415, "Tensors are sent as application/json.", {"accept": "application/json"})
        async with Intake(request, self.service) as body:
            answer = await self.service.run(lambda model: _infer(self.service, model, body), request.receive)
        return JSONResponse(answer)

    def _check_names(self, request: Request) -> None:
        model, version = request.path_params["model"], request.path_params.get("version", self.told.version)
        if (model, version) != (self.told.name, self.told.version):
            raise Problem(404, "There is no such model or version here.")


def _infer(service: Service, model: Model, body: bytes) -> dict[str, Any]:
    start = time.perf_counter()
    content = parse_json(body)
    pixels = _tensor(content, model.size, service.limits.max_images)
    logits = np.concatenate([model.engine(image[None]) for image in pixels])
    service.metrics.stage("infer", time.perf_counter() - start)
    service.metrics.images(len(pixels))
    output = {"name": "logits", "datatype": "FP32", "shape": list(logits.shape), "data": logits.ravel().tolist()}
    answer = {"model_name": model.name, "model_version": model.version, "outputs": [output]}
    if isinstance(content.get("id"), str):
        answer["id"] = content["id"]
    return answer


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) == 4 and all(type(n) is int for n in shape)


def _tensor(content: Any, size: int, max_images: int) -> np.ndarray:
    """Return the one input of a request, uint8 [B, 3, S, S].

    Raises:
        Problem: 400, 413.
    """
    inputs = content.get("inputs") if isinstance(content, dict) else None
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise Problem(400, "`inputs` must be a list of one tensor.")
    given: dict[str, Any] = inputs[0]
    shape: Any = given.get("shape")
    if (given.get("name"), given.get("datatype")) != ("image", "UINT8"):
        raise Problem(400, "The input must be called `image` and have the datatype UINT8.")
    if not _is_shape(shape) or shape[1:] != [3, size, size] or shape[0] < 1:
        raise Problem(400, f"The shape must be [images, 3, {size}, {size}].")
    if shape[0] > max_images:
        raise Problem(413, f"There are more than {max_images} images in the request.")
    wanted = [output.get("name") for output in content.get("outputs") or [] if isinstance(output, dict)]
    if any(output != "logits" for output in wanted):
        raise Problem(400, "The only output is `logits`.")
    try:
        values = np.asarray(given.get("data"))
        if values.dtype.kind not in "iu" or values.size != np.prod(shape) or values.min() < 0 or values.max() > 255:
            raise ValueError
        return values.reshape(shape).astype(np.uint8)
    except (ValueError, TypeError, OverflowError) as error:
        raise Problem(400, "`data` must hold whole numbers from 0 to 255, as many as the shape says.") from error

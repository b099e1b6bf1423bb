"""The end of a server's process, without HTTP: what a model that does not load leaves
behind.
"""

import asyncio
import socket

import pytest

from kd.core.errors import KdError
from kd.deploy.serve import server
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.model import describe
from kd.deploy.serve.service import Service


@pytest.fixture
def endpoint(exported):
    service = Service(describe(exported), Limits(), slots=1, threads=1)
    service.close()  # its threads take no work: `load` raises
    return server.Endpoint(service, ui=False)


def run(endpoint, ending: bool = False) -> None:
    async def serve() -> None:
        if ending:
            endpoint._end()
        await endpoint.run("127.0.0.1", server._free_address("127.0.0.1", 0)[1], "open")

    asyncio.run(serve())


def test_a_model_that_does_not_load_ends_the_server(endpoint):
    with pytest.raises(RuntimeError, match="shutdown"):
        run(endpoint)
    assert endpoint.service.draining


def test_a_model_that_is_not_loaded_when_the_server_ends_is_no_error(endpoint, capfd):
    run(endpoint, ending=True)
    assert "open" in capfd.readouterr().out


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_free_address_has_numbers_alone(host):
    address, port = server._free_address(host, 0)
    assert address in ("127.0.0.1", "::1")
    assert port > 0


def test_a_port_that_is_taken_is_refused():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(KdError, match="--port: cannot listen"),
    ):
        server._free_address(*listener.getsockname())

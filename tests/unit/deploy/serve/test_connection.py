"""One connection: its deadlines, its parser, and whose turn it is to parse."""

import asyncio
import functools
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import h11
import pytest
import uvicorn

from kd.deploy.serve import server
from kd.deploy.serve.connection import FREE_CHUNKS, Connection, DrainingServer, RequestParser, Shared
from kd.deploy.serve.limits import Limits
from kd.deploy.serve.model import describe
from kd.deploy.serve.service import Service

SIZE = 30_000_000
ASK = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def large(scope, receive, send) -> None:
    """Answer with more than the system's socket buffers hold."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % SIZE)]})
    await send({"type": "http.response.body", "body": bytes(SIZE)})


@contextmanager
def serving(limits: Limits) -> Iterator[socket.socket]:
    """Serve `large` on real sockets; yield a connected client."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    with socket.create_server(("127.0.0.1", 0)) as opened:
        http = functools.partial(Connection, shared=Shared(limits, large, lambda problem: ""))
        config = uvicorn.Config(large, http=http, ws="none", lifespan="off", log_config=None, loop="asyncio")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        try:
            with socket.create_connection(opened.getsockname(), timeout=20) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def received(client: socket.socket) -> int:
    """Read to the end and return how many bytes came."""
    count = 0
    try:
        while block := client.recv(2**20):
            count += len(block)
    except ConnectionResetError:
        pass
    return count


def test_a_client_that_does_not_read_is_cut_off():
    with serving(Limits(write_seconds=0.5)) as client:
        client.sendall(ASK)
        time.sleep(2)
        assert 0 < received(client) < SIZE


def test_a_client_that_does_not_read_its_second_response_is_cut_off():
    with serving(Limits(write_seconds=1)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)  # else it grows to that of the whole response
        kept, head, left = ASK.replace(b"connection: close\r\n", b""), b"", SIZE
        client.sendall(kept)
        while not head.endswith(b"\r\n\r\n"):
            head += client.recv(1)
        while left:  # the first response is read, and is longer than the buffers: the server had to pause
            left -= len(client.recv(min(left, 2**20)))
        client.sendall(kept)
        time.sleep(3)
        assert received(client) < SIZE


def test_a_client_that_reads_gets_the_whole_response():
    with serving(Limits(write_seconds=10)) as client:
        client.sendall(ASK)
        time.sleep(0.3)
        assert received(client) > SIZE


def send_slowly(client: socket.socket) -> None:
    for _ in range(150):
        client.sendall(b"G")
        time.sleep(0.02)


@pytest.mark.parametrize("before", [b"", b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["first", "second"])
def test_each_header_of_a_connection_has_a_deadline(before):
    """However often a byte of it comes."""
    with serving(Limits(header_seconds=0.4)) as client:
        if before:
            client.sendall(before)
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConnectionError):
            send_slowly(client)


def parsed(*pieces: bytes, **limits: int) -> RequestParser:
    """Give pieces of a request to a parser until it needs more."""
    parser = RequestParser(Limits(**limits))
    for piece in pieces:
        parser.receive_data(piece)
        while parser.next_event() not in (h11.NEED_DATA, h11.PAUSED):
            pass
    return parser


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"


def chunks(size: int, count: int) -> bytes:
    return count * (b"%x\r\n" % size + bytes(size) + b"\r\n")


def test_small_chunks():
    parsed(HEAD + b"\r\n" + chunks(1, FREE_CHUNKS))
    parsed(HEAD + b"\r\n" + chunks(256, 5000) + b"0\r\n\r\n")
    for size in (1, 200):
        with pytest.raises(h11.RemoteProtocolError, match="chunks of the body"):
            parsed(HEAD + b"\r\n" + chunks(size, 5000))


def test_a_large_body_pays_for_no_later_one():
    """The chunks of each request are counted on their own, on a connection that is kept."""
    parser = RequestParser(Limits())
    parser.receive_data(HEAD + b"\r\n" + chunks(2**16, 64) + b"0\r\n\r\n")
    while not isinstance(parser.next_event(), h11.EndOfMessage):
        pass
    parser.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
    parser.send(h11.EndOfMessage())
    parser.start_next_cycle()
    parser.receive_data(HEAD + b"\r\n" + chunks(1, 5000))
    with pytest.raises(h11.RemoteProtocolError, match="chunks of the body"):
        list(iter(parser.next_event, h11.NEED_DATA))


def test_header_lines():
    parsed(HEAD + 97 * b"a: b\r\n" + b"\r\n" + b"2\r\n\n\n\r\n")
    for text in (HEAD + 101 * b"a: b\r\n" + b"\r\n", HEAD + 101 * b"a: b\r\n", HEAD + 101 * b"a: b\n" + b"\n"):
        with pytest.raises(h11.RemoteProtocolError, match="header lines"):
            parsed(text)
    with pytest.raises(h11.RemoteProtocolError, match="trailer lines"):
        parsed(HEAD + b"\r\n0\r\n" + 101 * b"a: b\r\n" + b"\r\n")


def test_pipelined():
    ask = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    assert not parsed(ask).pipelined
    assert parsed(ask + b"G").pipelined
    assert parsed(ask, b"G").pipelined


def test_connections_take_turns_to_parse():
    """Jobs run in order, one in an iteration of the event loop; other callbacks run between them."""

    async def run() -> list[object]:
        shared, done = Shared(Limits(), large, lambda problem: ""), []
        for number in range(24):
            shared.parse_later(functools.partial(done.append, number))
        asyncio.get_running_loop().call_soon(done.append, "other")
        while len(done) < 25:
            await asyncio.sleep(0)
        return done

    assert asyncio.run(run()) == [0, "other", *range(1, 24)]


class Early(DrainingServer):
    """Gets a signal before uvicorn listens to signals."""

    def run(self, sockets=None) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_before_uvicorn_listens_ends_the_server(exported):
    early = Early(uvicorn.Config(large, log_config=None), Service(describe(exported), Limits(), 1, 1))
    server._run(early, socket.create_server(("127.0.0.1", 0)))
    assert early.should_exit


def test_a_model_that_is_not_loaded_when_the_server_ends_is_no_error(exported):
    service, errors = Service(describe(exported), Limits(), 1, 1), []
    ending = DrainingServer(uvicorn.Config(large, log_config=None), service)
    service.close()
    server._load(service, ending, errors)
    assert [type(error) for error in errors] == [RuntimeError]
    errors.clear()
    server._load(service, ending, errors)
    assert (errors, ending.should_exit) == ([], True)

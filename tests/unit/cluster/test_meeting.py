"""How hosts agree that a job has begun and how it has ended, over real connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from kd.cluster.hosts import Hosts, free_ports, read_hosts
from kd.cluster.meeting import JoinedHost, Meeting

TRAINERS, DATA = ("127.0.0.2", "127.0.0.3"), ("127.0.0.4",)


def together(act: Callable[[dict[str, JoinedHost]], Awaitable[None]], token: str = "") -> list[int]:
    """Let all hosts meet, `act`, and return how each was told that the job ended."""

    async def job() -> list[int]:
        port = free_ports(1)[0]
        hosts = [Hosts(me, TRAINERS, DATA, (port, 0, 0), token) for me in (*TRAINERS, *DATA)]
        meeting = asyncio.create_task(Meeting(hosts[0]).run())
        members = {each.me: await JoinedHost.join(each) for each in hosts}
        await act(members)
        codes = [await asyncio.wait_for(member.ended, 10) for member in members.values()]
        for member in members.values():
            await member.close()
        await asyncio.wait_for(meeting, 10)
        return codes

    return asyncio.run(job())


async def begin(members: dict[str, JoinedHost]) -> None:
    for number, member in enumerate(members.values()):
        assert not any(each.begun.done() for each in members.values()), number
        member.send("ready")
        await asyncio.sleep(0.05)
    await asyncio.gather(*(asyncio.wait_for(member.begun, 10) for member in members.values()))


def test_a_job_begins_with_the_last_host_and_ends_with_the_last_trainer():
    async def act(members: dict[str, JoinedHost]) -> None:
        await begin(members)
        members[TRAINERS[1]].send("done 0")
        await asyncio.sleep(0.05)
        assert not any(member.ended.done() for member in members.values())
        members[TRAINERS[0]].send("done 0")

    assert together(act) == [0, 0, 0]


def test_one_failure_ends_the_job_for_all():
    async def act(members: dict[str, JoinedHost]) -> None:
        await begin(members)
        members[TRAINERS[1]].send("done 75")

    assert together(act) == [75, 75, 75]


@pytest.mark.parametrize("lost", TRAINERS)
def test_a_trainer_whose_connection_breaks_has_failed(lost):
    async def act(members: dict[str, JoinedHost]) -> None:
        await begin(members)
        await members[lost].close()
        members[lost].end(1)

    assert together(act) == [1, 1, 1]


def test_a_data_host_may_break_away_and_come_back():
    async def act(members: dict[str, JoinedHost]) -> None:
        await begin(members)
        await members[DATA[0]].close()
        hosts = Hosts(DATA[0], TRAINERS, DATA, (members[TRAINERS[0]]._writer.get_extra_info("peername")[1], 0, 0))
        members[DATA[0]] = await JoinedHost.join(hosts)
        members[DATA[0]].send("ready")
        for name in TRAINERS:
            members[name].send("done 0")

    assert together(act) == [0, 0, 0]


def test_trainers_begin_without_a_host_that_does_not_come(monkeypatch, capsys):
    monkeypatch.setattr("kd.cluster.meeting.JOIN_SECONDS", 0.2)

    async def act(members: dict[str, JoinedHost]) -> None:
        for name in TRAINERS:
            members[name].send("ready")
        await asyncio.wait_for(members[TRAINERS[0]].begun, 10)
        for name in TRAINERS:
            members[name].send("done 0")

    assert together(act) == [0, 0, 0]
    assert DATA[0] in capsys.readouterr().err


def test_hosts_end_when_the_first_trainer_is_gone():
    async def job() -> int:
        async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.close()

        server = await asyncio.start_server(leave, "127.0.0.2", 0)
        port = server.sockets[0].getsockname()[1]
        member = await JoinedHost.join(Hosts(DATA[0], TRAINERS, DATA, (port, 0, 0)))
        code = await asyncio.wait_for(member.ended, 10)
        await member.close()
        server.close()
        return code

    assert asyncio.run(job()) == 1


# ------------------------------------------------------------------------------------------------------- strangers


async def refused(member: JoinedHost, first: bytes) -> None:
    """Connect as a stranger, send `first`, and wait until the meeting point has closed the connection."""
    reader, writer = await asyncio.open_connection(*member._writer.get_extra_info("peername"))
    writer.write(first)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


@pytest.mark.parametrize("line", ["done 0", "done 3", "ready", ""])
@pytest.mark.parametrize("token", ["", " ", " wrong", " secret2"])
def test_a_stranger_who_knows_a_trainers_name_ends_nothing(token, line):
    """A name and a closed connection ended the job with code 1; `done 0` reported success."""

    async def act(members: dict[str, JoinedHost]) -> None:
        await begin(members)
        _, writer = await asyncio.open_connection(*members[TRAINERS[0]]._writer.get_extra_info("peername"))
        writer.write(f"{TRAINERS[1]}{token}\n{line}\n".encode())
        writer.close()
        await refused(members[TRAINERS[0]], f"{TRAINERS[0]}{token}\n{line}\n".encode())
        assert not any(member.ended.done() for member in members.values())
        for name in TRAINERS:
            members[name].send("done 0")

    assert together(act, "secret") == [0, 0, 0]


def test_without_a_token_a_trainer_still_connects_only_once(capsys):
    async def act(members: dict[str, JoinedHost]) -> None:
        await begin(members)
        for _ in range(3):
            await refused(members[TRAINERS[0]], f"{TRAINERS[1]}\ndone 0\n".encode())
        for name in TRAINERS:
            members[name].send("done 0")

    assert together(act) == [0, 0, 0]
    assert capsys.readouterr().err.count(f"as {TRAINERS[1]} is refused") == 1


@pytest.mark.parametrize("line", ["done 0", "done 3", "done", "done x", "\udcff", "x" * 200_000])
def test_a_data_host_cannot_end_the_job(line):
    """A data host ended it with any code."""

    async def act(members: dict[str, JoinedHost]) -> None:
        await begin(members)
        members[DATA[0]]._writer.write(line.encode("utf-8", "surrogateescape") + b"\n")
        await asyncio.sleep(0.05)
        for name in TRAINERS:
            members[name].send("done 0")

    codes = together(act, "secret")
    assert codes[:2] == [0, 0]


def test_a_connection_that_says_nothing_is_closed(monkeypatch):
    monkeypatch.setattr("kd.cluster.meeting.FIRST_LINE_SECONDS", 0.1)

    async def act(members: dict[str, JoinedHost]) -> None:
        for first in (b"", b"127.0.0.2", b"x" * 200_000, b"\xff\n"):
            await refused(members[TRAINERS[0]], first)
        await begin(members)
        for name in TRAINERS:
            members[name].send("done 0")

    assert together(act) == [0, 0, 0]


def test_the_token_is_that_of_ray():
    groups = {
        "dnn": {"instance_group_name": "dnn", "hosts": ["a"]},
        "data": {"instance_group_name": "data", "hosts": ["b"]},
    }
    environ = {"SM_CURRENT_HOST": "a", "SM_INSTANCE_GROUPS_DICT": json.dumps(groups), "RAY_AUTH_TOKEN": "secret"}
    hosts = read_hosts(environ)
    assert hosts.token == "secret"
    assert "secret" not in repr(hosts)

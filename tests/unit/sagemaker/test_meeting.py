"""How hosts agree that a job has begun and how it has ended, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kd.sagemaker.hosts import Hosts, free_ports
from kd.sagemaker.meeting import Meeting, Member

TRAINERS, DATA = ("127.0.0.2", "127.0.0.3"), ("127.0.0.4",)


def together(act: Callable[[dict[str, Member]], Awaitable[None]]) -> list[int]:
    """Let all hosts meet, `act`, and return how each was told that the job ended."""

    async def job() -> list[int]:
        port = free_ports(1)[0]
        hosts = [Hosts(me, TRAINERS, DATA, (port, 0, 0)) for me in (*TRAINERS, *DATA)]
        meeting = asyncio.create_task(Meeting(hosts[0]).run())
        members = {each.me: await Member.join(each) for each in hosts}
        await act(members)
        codes = [await asyncio.wait_for(member.ended, 10) for member in members.values()]
        for member in members.values():
            await member.close()
        await asyncio.wait_for(meeting, 10)
        return codes

    return asyncio.run(job())


async def begin(members: dict[str, Member]) -> None:
    for number, member in enumerate(members.values()):
        assert not any(each.begun.done() for each in members.values()), number
        member.send("ready")
        await asyncio.sleep(0.05)
    await asyncio.gather(*(asyncio.wait_for(member.begun, 10) for member in members.values()))


def test_a_job_begins_with_the_last_host_and_ends_with_the_last_trainer():
    async def act(members: dict[str, Member]) -> None:
        await begin(members)
        members[TRAINERS[1]].send("done 0")
        await asyncio.sleep(0.05)
        assert not any(member.ended.done() for member in members.values())
        members[TRAINERS[0]].send("done 0")

    assert together(act) == [0, 0, 0]


def test_one_failure_ends_the_job_for_all():
    async def act(members: dict[str, Member]) -> None:
        await begin(members)
        members[TRAINERS[1]].send("done 75")

    assert together(act) == [75, 75, 75]


@pytest.mark.parametrize("lost", TRAINERS)
def test_a_trainer_whose_connection_breaks_has_failed(lost):
    async def act(members: dict[str, Member]) -> None:
        await begin(members)
        await members[lost].close()
        members[lost].end(1)

    assert together(act) == [1, 1, 1]


def test_a_data_host_may_break_away_and_come_back():
    async def act(members: dict[str, Member]) -> None:
        await begin(members)
        await members[DATA[0]].close()
        hosts = Hosts(DATA[0], TRAINERS, DATA, (members[TRAINERS[0]]._writer.get_extra_info("peername")[1], 0, 0))
        members[DATA[0]] = await Member.join(hosts)
        members[DATA[0]].send("ready")
        for name in TRAINERS:
            members[name].send("done 0")

    assert together(act) == [0, 0, 0]


def test_trainers_begin_without_a_host_that_does_not_come(monkeypatch, capsys):
    monkeypatch.setattr("kd.sagemaker.meeting.JOIN_SECONDS", 0.2)

    async def act(members: dict[str, Member]) -> None:
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
        member = await Member.join(Hosts(DATA[0], TRAINERS, DATA, (port, 0, 0)))
        code = await asyncio.wait_for(member.ended, 10)
        await member.close()
        server.close()
        return code

    assert asyncio.run(job()) == 1

"""Tests of where a command of a cluster goes; tests/farm/test_cluster.py has a real cluster."""

from contextlib import suppress
from typing import Any, cast

import pytest
import redis
from redis.connection import AbstractConnection
from redis.crc import key_slot

from embedfarm.contract.cluster_client import (
    FARM_SLOT,
    Address,
    ClusterClient,
    merge_facts,
    read_ranges,
    slot_of,
)
from tests.contract.little_job import run_everything


def slots_by_the_server(client: redis.Redis, words: list[Any]) -> set[int]:
    """Return the slots of a command's keys, as the server finds them."""
    split = [*str(words[0]).split(), *words[1:]]
    if len(split) == 1:
        return {FARM_SLOT}
    try:
        keys = client.execute_command("COMMAND GETKEYS", *split)
    except redis.ResponseError as error:
        assert "no key arguments" in str(error), words  # noqa: PT017 -- any other is a defect
        return {FARM_SLOT}
    return {key_slot(key.encode()) for key in keys}


def test_commands_go_where_their_keys_are(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command that a farm sends has keys of one slot, and that is the one it is sent to."""
    sent: list[tuple[Any, ...]] = []
    send, pack = AbstractConnection.send_command, AbstractConnection.pack_commands

    def send_noted(connection: AbstractConnection, *words: object, **options: object) -> None:
        sent.append(words)
        send(connection, *words, **options)  # type: ignore[no-untyped-call] # redis-py's

    def pack_noted(connection: AbstractConnection, commands: Any) -> Any:  # noqa: ANN401 -- redis-py's
        sent.extend(tuple(each) for each in commands)
        return pack(connection, commands)  # type: ignore[no-untyped-call] # redis-py's

    with monkeypatch.context() as patch:
        patch.setattr(AbstractConnection, "send_command", send_noted)
        patch.setattr(AbstractConnection, "pack_commands", pack_noted)
        run_everything(client)
    names = {str(words[0]) for words in sent}
    assert {"EVALSHA", "XREADGROUP", "HSET", "BLPOP"} <= names
    for words in sent:
        if words[0] not in {"MULTI", "EXEC", "INFO", "HELLO"}:
            assert slots_by_the_server(client, [*words]) == {slot_of(words)}, words


def test_a_node_without_a_name_is_the_one_that_was_asked() -> None:
    """A node that knows no host of its own leaves it empty; replicas follow their primary."""
    answer = [[0, 99, [b"", 1, b"id"], [b"b", 2, b"id", []]], [100, 16383, [b"b", 2, b"id"]]]
    found = list(read_ranges(answer, Address("asked", 1)))
    assert [each.nodes for each in found] == [
        [Address("asked", 1), Address("b", 2)],
        [Address("b", 2)],
    ]
    assert [(each.first, each.last) for each in found] == [(0, 99), (100, 16383)]


class Node:
    """A node that says where slots are, and answers nothing else if it is not there."""

    connection_pool = None

    def __init__(self, says: str, *, there: bool) -> None:
        self.says, self.there = says, there

    def execute_command(self, *words: str, **_: object) -> object:
        """Answer as a node does."""
        if words[0] == "CLUSTER SLOTS":
            return [[0, 16383, [self.says.encode(), 1, b""]]]
        if not self.there:
            raise redis.ConnectionError("cut off")
        return self.says


def test_a_node_that_is_cut_off_is_not_believed_for_ever() -> None:
    """A node that still takes itself for a primary, and answers nothing, costs some tries."""
    nodes = {"left": "left", "right": "right"}
    made = {
        Address(name, 1): cast("redis.Redis", Node(says, there=name == "right"))
        for name, says in nodes.items()
    }
    client = ClusterClient(list(made), made.__getitem__)
    for _ in range(2):
        with suppress(redis.ConnectionError):
            client.get("a")
    assert client.get("a") == "right"


def test_facts_are_those_of_all_primaries() -> None:
    """The room is that of the fullest one, and what one of them lacks, the cluster lacks."""
    good = {"used_memory": 5, "maxmemory": 100, "maxmemory_policy": "noeviction", "aof_enabled": 1}
    full = good | {"used_memory": 90, "run_id": "b"}
    evicts = good | {"maxmemory_policy": "allkeys-lru", "run_id": "c", "aof_enabled": 0}
    assert merge_facts([good | {"run_id": "a"}, full, evicts]) == {
        "used_memory": 90,
        "maxmemory": 100,
        "maxmemory_policy": "allkeys-lru",
        "aof_enabled": 0,
        "run_id": "a b c",
    }
    assert merge_facts([good, good]) == good

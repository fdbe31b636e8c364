"""Client of a cluster, in which each job has a primary of its own.

Keys of a job lie in one slot, and those of the farm in another, so that every command and script
has one primary, and a pipeline is split among a few. redis-py's own client of clusters is not used
since it sends a command of a pipeline again after a lost reply, and takes no scripts in pipelines.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import redis
from redis.client import Pipeline
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError

FARM_SLOT: Final = key_slot(b"farm")  # of all keys with the tag {farm}
REDIRECTIONS_MAX: Final = 5  # of a command; a slot that moves takes two
STARTS_WITH_KEY: Final = 1
COUNTED_KEYS: Final = frozenset({"EVAL", "EVALSHA"})  # script, number of keys, keys
KEYLESS: Final = frozenset({
    "ACL", "CLIENT", "COMMAND", "CONFIG", "DBSIZE", "ECHO", "PING", "SCRIPT", "TIME",
})  # fmt: skip
AWAY: Final = (redis.ConnectionError, redis.TimeoutError)


class Address(NamedTuple):
    """Host and port of a node."""

    host: str
    port: int


class SlotRange(NamedTuple):
    """Consecutive slots, both ends included, and the nodes that have them, the primary first."""

    first: int
    last: int
    nodes: list[Address]


def slot_of(words: Sequence[Any]) -> int:
    """Return the slot of a command: that of its first key, or the farm's where it has none."""
    name = str(words[0]).upper()
    if name.partition(" ")[0] in KEYLESS:
        return FARM_SLOT
    place = STARTS_WITH_KEY
    if name in COUNTED_KEYS:
        place = 3
    elif name in {"XREAD", "XREADGROUP"}:
        place = next(n for n, word in enumerate(words) if word in {"STREAMS", b"STREAMS"}) + 1
    key = words[place]
    return key_slot(key if isinstance(key, bytes) else str(key).encode())


class ClusterClient(redis.Redis):
    """Client that sends each command to the primary which has its slot, and never a second time.

    What was refused because its slot lies elsewhere was not done, and is sent there. After a lost
    connection the slots are asked for again before the next command.

    Args:
        seeds: Addresses of nodes that may be asked for the others.
        make: Returns a client of the node at an address.
    """

    def __init__(self, seeds: Collection[Address], make: Callable[[Address], redis.Redis]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._seeds = tuple(seeds)
        self._known = dict.fromkeys(seeds)
        self._nodes: dict[Address, redis.Redis] = {}
        self._primaries: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._stale = True
        super().__init__(connection_pool=self._node(self._seeds[0]).connection_pool)

    def execute_command(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 -- redis-py's
        """Send a command to its primary, and return its answer.

        INFO is asked of all primaries, for what is true of the cluster: see `merge_facts`; a script
        is loaded on all of them.

        Raises:
            redis.ConnectionError, redis.TimeoutError: Its primary is away.
            ClusterDownError: No node has its slot.
        """
        name = str(args[0]).upper()
        if name in {"INFO", "SCRIPT LOAD"}:
            with self._noting_loss():
                asked = [node.execute_command(*args, **options) for node in self._all_primaries()]
            return merge_facts(asked) if name == "INFO" else asked[0]
        slot = slot_of(args)
        sent_on: AskError | None = None
        for _ in range(REDIRECTIONS_MAX):
            try:
                if sent_on is not None:
                    return self.ask(sent_on, args, options)
                with self._noting_loss():
                    return self.primary(slot).execute_command(*args, **options)
            except MovedError as error:  # also of a command that waits where its slot was
                self._note_move(error)
                sent_on = None
            except AskError as error:
                sent_on = error
        raise ClusterDownError(f"slot {slot} moves on and on")

    def pipeline(self, transaction: bool = True, shard_hint: object = None) -> "ClusterPipeline":  # noqa: FBT001, FBT002 -- redis-py's
        """Return a pipeline whose commands may be of several slots, unless it is a transaction."""
        return ClusterPipeline(self, transaction=transaction, shard_hint=shard_hint)

    def primary(self, slot: int) -> redis.Redis:
        """Return the client of the primary that has a slot.

        Raises:
            redis.ConnectionError: No node answers.
            ClusterDownError: No node has the slot.
        """
        if self._stale:
            self._refresh()
        address = self._primaries[slot]
        if address is None:
            self._stale = True
            raise ClusterDownError(f"no node has slot {slot}")
        return self._node(address)

    def ask(self, error: AskError, words: Sequence[Any], options: Mapping[str, Any]) -> Any:  # noqa: ANN401 -- redis-py's
        """Send a command to the node that is about to get its slot."""
        with self._noting_loss():
            pipe = self._node(Address(error.host, error.port)).pipeline(transaction=False)
            pipe.execute_command("ASKING")
            pipe.execute_command(*words, **options)
            return pipe.execute()[1]

    def close(self) -> None:
        """Close the connections to all nodes."""
        with self._lock:
            for node in self._nodes.values():
                node.close()

    @contextlib.contextmanager
    def _noting_loss(self) -> Any:  # noqa: ANN401 -- a context
        """Have the slots asked for again if the body loses its connection, or finds none."""
        try:
            yield
        except (*AWAY, ClusterDownError):
            self._stale = True
            raise

    def _node(self, address: Address) -> redis.Redis:
        with self._lock:
            if address not in self._nodes:
                self._nodes[address] = self._make(address)
            return self._nodes[address]

    def _all_primaries(self) -> list[redis.Redis]:
        self.primary(FARM_SLOT)
        return [self._node(each) for each in dict.fromkeys(self._primaries) if each is not None]

    def _note_move(self, error: MovedError) -> None:
        """Note where a slot has gone; others may have gone, too, and are asked for."""
        self._refresh()
        self._primaries[error.slot_id] = Address(error.host, error.port)

    def _refresh(self) -> None:
        """Ask the nodes in turn who has which slots, each time another one first.

        One that is cut off from the others goes on to answer with what it knew.
        """
        lost: Exception | None = None
        for address in list(self._known):
            try:
                answer = self._node(address).execute_command("CLUSTER SLOTS")
            except AWAY as error:
                lost = error
                continue
            ranges = list(read_ranges(answer, address))
            primaries: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
            for first, last, nodes in ranges:
                primaries[first : last + 1] = [nodes[0]] * (last - first + 1)
            named = [node for each in ranges for node in each.nodes]
            with self._lock:
                others = [each for each in [*named, *self._seeds] if each != address]
                self._known = dict.fromkeys([*others, address])
                self._primaries, self._stale = primaries, False
                for gone in self._nodes.keys() - self._known.keys():
                    self._nodes.pop(gone).close()
            return
        raise redis.ConnectionError(f"no node of the cluster answers: {lost}")


class ClusterPipeline(Pipeline):
    """Pipeline of a cluster's client: one of each primary that has slots of its commands.

    A transaction must be of one slot. Scripts are loaded where they are needed.
    """

    def __init__(self, client: ClusterClient, *, transaction: bool, shard_hint: object) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, shard_hint)
        self._client = client

    def execute(self, raise_on_error: bool = True) -> list[Any]:  # noqa: FBT001, FBT002 -- redis-py's
        """Send all commands, and return their answers in order.

        Raises:
            redis.ConnectionError, redis.TimeoutError: A primary is away; what others have done
                stays done.
            redis.ResponseError: The first one among the answers, if `raise_on_error`.
        """
        stack, scripts = self.command_stack, self.scripts
        try:
            answers = self._answers(stack, scripts)
        finally:
            self.reset()
        if raise_on_error:
            self.raise_first_error(stack, answers)  # type: ignore[no-untyped-call] # redis-py's
        return answers

    def _answers(self, stack: Sequence[Any], scripts: Iterable[Any]) -> list[Any]:
        answers: dict[int, Any] = {}
        shares: dict[int, tuple[redis.Redis, list[int]]] = {}
        for place, (words, options) in enumerate(stack):
            if str(words[0]).upper() == "INFO":
                answers[place] = self._client.execute_command(*words, **options)
                continue
            node = self._client.primary(slot_of(words))
            shares.setdefault(id(node), (node, []))[1].append(place)
        for node, places in shares.values():
            with self._client._noting_loss():  # noqa: SLF001 -- its own pipeline
                pipe = node.pipeline(transaction=self.transaction)
                pipe.scripts = set(scripts)
                for place in places:
                    words, options = stack[place]
                    pipe.execute_command(*words, **options)
                answers |= zip(places, pipe.execute(raise_on_error=False), strict=True)
        for place, answer in answers.items():
            if isinstance(answer, AskError):  # or moved, which is one: it was refused, and not done
                words, options = stack[place]
                answers[place] = self._client.execute_command(*words, **options)
        return [answers[place] for place in range(len(stack))]


def read_ranges(answer: Iterable[Any], asked: Address) -> Iterable[SlotRange]:
    """Yield the ranges of the answer to CLUSTER SLOTS by the node that was asked.

    A node that knows no name of its own leaves its host empty: it is the one that answers.
    """
    for first, last, *nodes in answer:
        hosts = ((each[0].decode() if isinstance(each[0], bytes) else each[0]) for each in nodes)
        named = zip(hosts, nodes, strict=True)
        yield SlotRange(
            int(first),
            int(last),
            [Address(host or asked.host, int(each[1])) for host, each in named],
        )


def merge_facts(asked: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one answer to INFO for all primaries: that of the one with the least room.

    It has the ids of all of them as `run_id`, so that it changes when one starts again or another
    takes its place, and the policy of one that evicts keys, if any does.
    """
    most = max(_fill(each) for each in asked)
    fullest = dict(next(each for each in asked if _fill(each) == most))
    if "run_id" in fullest:
        fullest["run_id"] = " ".join(str(each["run_id"]) for each in asked)
    for name, good in (("maxmemory_policy", "noeviction"), ("aof_enabled", 1)):
        if name in fullest:
            fullest[name] = next((each[name] for each in asked if each[name] != good), good)
    return fullest


def _fill(facts: Mapping[str, Any]) -> float:
    most = cast("int", facts.get("maxmemory", 0))
    return facts.get("used_memory", 0) / most if most else 0.0

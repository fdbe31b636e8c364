"""Actors on a Ray cluster, each of which runs the workers of what Ray has lent it.

This is the one module that imports Ray. What goes to an actor are a few strings, in calls from
process to process: Ray keeps the arguments of calls nowhere, while those of constructors and
environments are kept for restarts, and shown.
"""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import ray
from ray._private.state import state as ray_state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.processes import KILL_SECONDS, STARTS_MAX, next_pause
from embedfarm.contract.redaction import hide_secrets
from embedfarm.workers.placed_workers import DRAIN, Look, PlacedWorkers
from embedfarm.workers.placement import ActorPlace, FleetWish, Node, changes, cores_of, places

NEAREST: Final = "auto"  # the address of the cluster that this machine, or RAY_ADDRESS, is of
SILENT_SECONDS: Final = 10.0
"""An actor that says nothing for so long is replaced; Ray takes longer to miss a node."""
AVOID_SECONDS: Final = 120.0  # Ray has missed a silent node by then, or it has come back
NODE_LABEL: Final = "ray.io/node-id"
NAME_CHARACTERS: Final = 8
ENDING_SECONDS: Final = 4 * KILL_SECONDS
"""How much longer than `drain_seconds` an actor may take to end its nested processes."""

log = logging.getLogger(__name__)


class ClusterError(EmbedfarmError, RuntimeError):
    """Raised when a Ray cluster cannot be reached, or no workers get beyond their start on it."""


class RayWorkers:
    """An actor, whose methods Ray calls; what they take and return is JSON."""

    def __init__(self) -> None:
        context = ray.get_runtime_context()
        self._node = context.get_node_id()
        gpus = context.get_accelerator_ids().get("GPU", [])
        self._workers = PlacedWorkers(context.get_actor_id()[:NAME_CHARACTERS], gpus)

    def begin(self, environment: str, place: str) -> str:
        """Start the workers with these settings, at this place, and return a `Look`."""
        (own,) = (node for node in alive_nodes() if node.id == self._node)
        given = msgspec.json.decode(environment, type=dict[str, str])
        self._workers.begin(given, cores_of(msgspec.json.decode(place, type=ActorPlace), own))
        return self.look()

    def look(self) -> str:
        """Return a `Look` at the workers."""
        look = self._workers.look()
        look.node = self._node
        # No part of Ray's public interface, but all that tells of a machine that is to go.
        look.leaving = self._node in getattr(ray_state, "get_draining_nodes", dict)()
        return msgspec.json.encode(look).decode()

    def drain(self) -> None:
        """End the workers, which hand back what they have not begun."""
        self._workers.drain()


def alive_nodes() -> list[Node]:
    """Return the nodes of the cluster that are alive, with what each gives out in all."""
    return [
        Node(
            each["NodeID"],
            int(each["Resources"].get("CPU", 0)),
            int(each["Resources"].get("GPU", 0)),
        )
        for each in ray.nodes()
        if each["Alive"]
    ]


def join_cluster(address: str) -> None:
    """Connect this process to a Ray cluster.

    Args:
        address: `NEAREST`, or the URL of a cluster for Ray's client.

    Raises:
        ClusterError: No cluster answers there.
    """
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"no Ray cluster at {address}: {error}") from error


@dataclass
class _Actor:
    """An actor that has been asked for.

    Attributes:
        place: What it has asked Ray for.
        handle: Ray's handle of it.
        answer: Ray's reference to the answer that it owes.
        started: Clock when it was asked for.
        heard: Clock when it answered last.
        look: What it answered; None until Ray has found a node for it.
    """

    place: ActorPlace
    handle: Any
    answer: Any
    started: float
    heard: float
    look: Look | None = None


@dataclass(frozen=True)
class _Leaver:
    """An actor whose workers drain: its handle, the answer that it owes, and until when."""

    handle: Any
    answer: Any
    until: float


@dataclass
class RayFleet:
    """Keeper of actors on a cluster: as many as are wanted, in place of those that end new ones.

    Args:
        wish: What workers are wanted.
        environment: Settings for them as variables; the server's URL and `drain_seconds` are
            among them.
    """

    wish: FleetWish
    environment: Mapping[str, str]
    _actors: dict[int, _Actor] = field(default_factory=dict)
    _leavers: list[_Leaver] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _wanted: Counter[ActorPlace] = field(default_factory=Counter)
    _failures: Counter[ActorPlace] = field(default_factory=Counter)  # in a row
    _pauses: dict[ActorPlace, float] = field(
        default_factory=dict
    )  # seconds, after the last failure
    _rests: dict[ActorPlace, float] = field(default_factory=dict)  # until when
    _silent: dict[str, float] = field(default_factory=dict)  # nodes, until when
    _going: set[str] = field(default_factory=set)  # nodes
    _reason: str = ""  # of the last failure

    def tick(self) -> None:
        """Hear from each actor how it is, and have as many of them as are wanted.

        Raises:
            ClusterError: The workers of no place get beyond their start.
        """
        for key in list(self._actors):
            self._hear(key)
        self._end_leavers()
        nodes = alive_nodes()
        self._going &= {node.id for node in nodes}
        self._wanted = places(self.wish, [node for node in nodes if node.id not in self._going])
        start, over = changes(self._wanted, {key: each.place for key, each in self._actors.items()})
        for key in over:
            self._let_go(key)
        for place, count in start.items():
            self._start(place, count)
        if self._wanted and all(
            self._failures[place] >= STARTS_MAX * count for place, count in self._wanted.items()
        ):
            raise ClusterError(f"no workers get beyond their start on this cluster: {self._reason}")

    def describe(self) -> str:
        """Return in words how many actors work, start and wait, and on which hosts."""
        looks = [each.look for each in self._actors.values() if each.look is not None]
        begun = [look for look in looks if look.begun]
        hosts = ", ".join(sorted({look.host for look in begun}))
        others = {
            "starting": len(looks) - len(begun),
            "waiting for a node": self._wanted.total() - len(looks),
        }
        words = [f"{len(begun)} of {self._wanted.total()} actors at work"]
        words += [f"on {hosts}"] if hosts else []
        words += [f"({count} {what})" for what, count in others.items() if count > 0]
        return " ".join(words)

    def drain(self) -> None:
        """End all workers, which hand back what they have not begun, and then their actors."""
        for key in list(self._actors):
            self._let_go(key)
        while self._leavers:
            owed = [each.answer for each in self._leavers]
            ray.wait(owed, num_returns=len(owed), timeout=1.0)
            self._end_leavers()

    def _start(self, place: ActorPlace, count: int) -> None:
        """Ask for actors at a place, unless one has just failed there."""
        now = time.monotonic()
        self._silent = {node: until for node, until in self._silent.items() if until > now}
        if place.node in self._silent or self._rests.get(place, now) > now:
            return
        words = msgspec.json.encode(dict(self.environment)), msgspec.json.encode(place)
        for _ in range(count):
            handle = ray.remote(RayWorkers).options(**self._options(place)).remote()
            answer = handle.begin.remote(*(each.decode() for each in words))
            self._actors[next(self._numbers)] = _Actor(place, handle, answer, now, now)

    def _options(self, place: ActorPlace) -> dict[str, Any]:
        """Return what Ray is asked for an actor."""
        options: dict[str, Any] = {
            "num_cpus": place.cpus,
            "num_gpus": place.gpus,
            "max_restarts": 0,  # Ray would have to keep the settings
            "scheduling_strategy": "SPREAD",
        }
        if place.node:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(place.node, soft=False)
        elif self._silent:
            options["label_selector"] = {NODE_LABEL: f"!in({','.join(self._silent)})"}
        return options

    def _hear(self, key: int) -> None:
        """Take the answer of an actor, if it has come, and ask it again."""
        actor, now = self._actors[key], time.monotonic()
        if ray.wait([actor.answer], timeout=0)[0]:
            try:
                actor.look = msgspec.json.decode(ray.get(actor.answer), type=Look)
                actor.heard = now
            except ray.exceptions.ActorUnavailableError as error:
                if actor.look is None:  # nobody knows whether it has begun
                    return self._lose(key, error)
            except ray.exceptions.RayError as error:
                return self._lose(key, error)
            actor.answer = actor.handle.look.remote()
        look = actor.look
        if look is None:
            return None
        if look.failed:
            return self._lose(key, look.failed)
        if now - actor.heard > SILENT_SECONDS:
            self._silent[look.node] = now + AVOID_SECONDS
            return self._lose(key, f"nobody has heard of it for {SILENT_SECONDS:.0f} s")
        if look.begun:
            self._failures[actor.place] = 0
        if look.leaving:
            log.info("the node of %s is about to go: its workers drain", look.host)
            self._going.add(look.node)
            self._let_go(key)
        return None

    def _lose(self, key: int, reason: object) -> None:
        """Give up an actor that has ended, or has to."""
        actor, now = self._actors.pop(key), time.monotonic()
        ray.kill(actor.handle)
        place, lived = actor.place, now - actor.started
        has_worked = actor.look is not None and actor.look.begun
        self._failures[place] += not has_worked
        self._pauses[place] = next_pause(self._pauses.get(place, 0.0), lived if has_worked else 0)
        self._rests[place] = now + self._pauses[place]
        where = actor.look.host if actor.look else "a node that is not known"
        self._reason = f"the actor on {where} ended: {hide_secrets(str(reason).strip())}"
        log.warning("%s", self._reason)

    def _let_go(self, key: int) -> None:
        """Have the workers of an actor drain, beside whatever goes on; one in the queue is gone."""
        actor = self._actors.pop(key)
        if actor.look is None:
            ray.kill(actor.handle)
            return
        until = time.monotonic() + float(self.environment[DRAIN]) + ENDING_SECONDS
        self._leavers.append(_Leaver(actor.handle, actor.handle.drain.remote(), until))

    def _end_leavers(self) -> None:
        """End the actors whose workers have drained, and those that have taken too long."""
        now = time.monotonic()
        for each in list(self._leavers):
            if each.until < now or ray.wait([each.answer], timeout=0)[0]:
                ray.kill(each.handle)
                self._leavers.remove(each)

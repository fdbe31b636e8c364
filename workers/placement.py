"""The places of workers on a cluster of somebody else's, such as Ray's, by what it has: pure.

A worker is placed by an actor, which holds what it asked the cluster for until it ends. By default
workers follow the cluster: one on each GPU, and one on each node without GPUs. Where a number of
workers is wanted, the cluster chooses their nodes, and brings more nodes if it can.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypeVar, cast, get_args

from embedfarm.contract.errors import EmbedfarmError

CPUS: Final = 4  # of an actor whose node the cluster chooses: for a worker or two
Kinds: TypeAlias = Literal["all", "gpu", "cpu"]

Key = TypeVar("Key")


class PlacementError(EmbedfarmError, ValueError):
    """Raised when what is wanted of a cluster cannot be said so."""

    exit_status = 2


@dataclass(frozen=True)
class Node:
    """A machine of the cluster that is alive.

    Attributes:
        id: The cluster's name for it.
        cpus: CPUs that the cluster gives out there.
        gpus: GPUs that the cluster gives out there.
    """

    id: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class ActorPlace:
    """What one actor asks the cluster for.

    Attributes:
        cpus: CPUs; 0 for a GPU's worker that may use its share of the node's.
        gpus: GPUs, 1 or 0.
        node: Id of the node that it must be on; "" where the cluster chooses.
    """

    cpus: int
    gpus: int
    node: str = ""


@dataclass(frozen=True)
class FleetWish:
    """What workers somebody wants on a cluster.

    Attributes:
        kinds: "gpu": on GPUs; "cpu": on CPUs of any node; "all": on each GPU, and on the CPUs of
            nodes that have none.
        workers: Number of actors; 0: as many as there are devices, now or later.
        cpus: CPUs of each actor; 0: all of its node for one on CPUs that follows the cluster,
            `CPUS` for one on CPUs whose node the cluster chooses, and none for one on a GPU.
    """

    kinds: Kinds = "all"
    workers: int = 0
    cpus: int = 0

    def __post_init__(self) -> None:
        """Refuse a number of workers of no kind.

        Raises:
            PlacementError: It is not said whether they are to be on GPUs or CPUs.
        """
        if self.workers and self.kinds == "all":
            raise PlacementError(
                f"{self.workers} workers on a cluster may be on GPUs or on CPUs: give --devices "
                "gpu or --devices cpu"
            )


def parse_kinds(devices: str) -> Kinds:
    """Return what `--devices` means on a cluster, whose nodes are not known beforehand.

    Raises:
        PlacementError: It names devices of one host.
    """
    if devices not in get_args(Kinds):
        raise PlacementError(
            f"--devices {devices} names devices of one host; on a cluster it is all, gpu or cpu"
        )
    return cast("Kinds", devices)


def places(wish: FleetWish, nodes: Iterable[Node]) -> Counter[ActorPlace]:
    """Return how many actors of each kind are to be on a cluster."""
    if wish.workers:
        place = (
            ActorPlace(wish.cpus, 1) if wish.kinds == "gpu" else ActorPlace(wish.cpus or CPUS, 0)
        )
        return Counter({place: wish.workers})
    found: Counter[ActorPlace] = Counter()
    for node in nodes:
        cpus = min(wish.cpus or node.cpus, node.cpus)
        if node.gpus and wish.kinds != "cpu":
            found[ActorPlace(wish.cpus, 1, node.id)] = node.gpus
        elif cpus and wish.kinds != "gpu":
            found[ActorPlace(cpus, 0, node.id)] = 1
    return found


def changes(
    wanted: Counter[ActorPlace], held: Mapping[Key, ActorPlace]
) -> tuple[Counter[ActorPlace], list[Key]]:
    """Compare what is wanted with the actors that there are.

    Returns:
        How many actors are to be started at each place, and which are to be ended; of several at
        one place the oldest stay.
    """
    left = Counter(wanted)
    over = []
    for key, place in held.items():
        if left[place] > 0:
            left[place] -= 1
        else:
            over.append(key)
    return +left, over


def cores_of(place: ActorPlace, node: Node) -> int:
    """Return how many cores a worker at a place may use; 0 for all that its host lets it have."""
    if place.cpus:
        return place.cpus
    return node.cpus // node.gpus if node.gpus else 0

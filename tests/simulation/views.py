"""Views of jobs as clients see them, each time that a job has changed."""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from embedfarm.contract.status import ENDED_STATES

ENDED: Final = frozenset(state.encode() for state in ENDED_STATES)


class Broken(AssertionError):
    """Raised when something has happened that must never happen."""


class View(NamedTuple):
    """A job as a client sees it.

    Attributes:
        life: Its creation time, which each creation of a job has of its own; None without a job.
        state: Its state, as in `JobStatus`.
        done: Number of chunks that are embedded.
        generation: Its generation, new with each creation and each loss of blocks.
    """

    life: bytes | None
    state: bytes
    done: int
    generation: bytes | None = None


GONE: Final = View(None, b"", 0)


@dataclass
class Views:
    """The views that clients have had of all jobs, by the key of the jobs' counters.

    Attributes:
        lives: How often each job was made.
    """

    lives: dict[bytes, int] = field(default_factory=dict)
    _made: set[tuple[bytes, bytes]] = field(default_factory=set)
    _generations: dict[bytes, list[bytes]] = field(default_factory=dict)
    _last: dict[bytes, View] = field(default_factory=dict)

    def forget(self) -> None:
        """Forget the last views: a server that lost the end of its log shows an earlier time."""
        self._last.clear()

    def see(self, meta: bytes, view: View, *, lost: bool) -> None:
        """Look at a job that may have changed.

        Args:
            meta: The key of the job's counters.
            view: The job as it is now.
            lost: Whether a script has just said that chunks of it were lost.

        Raises:
            Broken: The job cannot have become so.
        """
        last = self._last.get(meta, GONE)
        self._last[meta] = view
        if view.life is not None and (meta, view.life) not in self._made:
            self._made.add((meta, view.life))
            self.lives[meta] = self.lives.get(meta, 0) + 1
        generations = self._generations.setdefault(meta, [])
        if view.generation is not None and view.generation not in generations:
            generations.append(view.generation)
        if view.life != last.life or self._is_put_right(meta, view):
            return
        if view.done < last.done and not lost:
            raise Broken(f"{view.done} chunks of {meta.decode()} are done, {last.done} were")
        if last.state in ENDED and view.state != last.state:
            raise Broken(f"{meta.decode()} is {view.state.decode()}, was {last.state.decode()}")

    def _is_put_right(self, meta: bytes, view: View) -> bool:
        """Tell whether a job that a crash had put back into an earlier generation is finished now.

        The command that made its later generation has all vectors of that on its disk, and says
        so: in the earlier one the job may have had more chunks, or have failed.
        """
        return view.state == b"finished" and view.generation not in self._generations[meta][-1:]

"""A handle on what the server has of one job."""

from dataclasses import dataclass, field
from typing import cast

import redis
from redis.commands.core import Script

from embedfarm.contract import wire


@dataclass
class JobHandle:
    """A handle on one job, which holds no state of its own.

    Attributes:
        client: Client of the server.
        id: Name of the job.
        owner: Owner of the output that the job fills. A job that another owner has made under the
            same name since is as if it were gone. "" acts for any owner.
        actor: Who acts through this handle, for the timeline; "" for the program's own account.
    """

    client: redis.Redis
    id: str
    owner: str = ""
    actor: str = field(default="", kw_only=True)
    keys: wire.JobKeys = field(init=False)

    def __post_init__(self) -> None:
        self.keys = wire.JobKeys(self.id)

    def _script(self, name: str) -> Script:
        return self.client.register_script(wire.script(name))

    def _is_ours(self, owner: bytes | None) -> bool:
        """Tell whether this handle may act for the job that has this owner."""
        return not self.owner or (owner or b"").decode(errors="replace") == self.owner

    def _note(self, command: str, *words: str | float | bytes) -> bytes | None:
        answer = self._script("note")(keys=[self.keys.meta], args=[command, self.owner, *words])
        return cast("bytes | None", answer)

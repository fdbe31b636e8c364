"""The farm's own keys on the server, as one caller sees them."""

from dataclasses import dataclass

from redis.commands.core import Script

from embedfarm.contract import wire
from embedfarm.contract.encoding import R
from embedfarm.contract.unreadable_records import Report, name_once, read_or_skip
from embedfarm.contract.visibility import Sight


@dataclass
class FarmKeys(Sight):
    """Access to the farm's own keys; a record there that cannot be read is as if it were not there.

    Attributes:
        on_unreadable: Called for each such record, with its place and why it cannot be read.
    """

    on_unreadable: Report = name_once

    def _script(self, name: str) -> Script:
        return self.client.register_script(wire.script(name))

    def _read(self, kind: type[R], place: str, data: bytes | None) -> R | None:
        """Return a record; None where there is none, or none that can be read."""
        return None if data is None else read_or_skip(kind, data, place, self.on_unreadable)

"""One reader of the farm's view for all that a tenant asks: it keeps an hour's curves."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Annotated, Final, cast

from fastapi import Depends, Request

from embedfarm.watch.view import FarmReader
from embedfarm.web.services import Service, Services

READERS_MAX: Final = 64


@dataclass
class Readers:
    """Readers of what each tenant may see, kept for the tenants that asked last."""

    _kept: "OrderedDict[str | None, FarmReader]" = field(default_factory=OrderedDict)

    def find(self, services: Services) -> FarmReader:
        """Find the reader for a caller's tenant; call it on the event loop only."""
        tenant = services.caller.tenant
        reader = self._kept.pop(tenant, None) or FarmReader(services.farm, services.settings)
        self._kept[tenant] = reader
        if len(self._kept) > READERS_MAX:
            self._kept.popitem(last=False)
        return reader


async def _reader(request: Request, services: Service) -> FarmReader:
    return cast("Readers", request.app.state.readers).find(services)


Reader = Annotated[FarmReader, Depends(_reader)]

"""One reader of the farm's view for all pages: it keeps an hour's curves."""

from typing import Annotated, cast

from fastapi import Depends, Request

from embedfarm.view import FarmReader
from web.pages.drawing import Gallery


async def _reader(request: Request) -> FarmReader:
    return cast("FarmReader", request.app.state.reader)


async def _gallery(request: Request) -> Gallery:
    return cast("Gallery", request.app.state.gallery)


Reader = Annotated[FarmReader, Depends(_reader)]
Charts = Annotated[Gallery, Depends(_gallery)]

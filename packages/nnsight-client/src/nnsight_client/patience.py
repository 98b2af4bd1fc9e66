"""When something is asked of a server once more: only where nothing of it can have run.

Nothing was sent where no connection could be made, and a server that is busy says so before it runs
anything. A trace that was sent is never sent again. What only asks (the tree) may be asked again
whatever became of it.
"""

from __future__ import annotations

from asyncio import sleep as sleep_async
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from email.utils import parsedate_to_datetime
from time import sleep

import httpx

RETRIES = 3
LONGEST = 60.0
"""Seconds that are waited at most; whoever says more is not waited for."""
_FIRST = 0.1
_BUSY = (429, 503)


@contextmanager
def sending(
    send: Callable[[], AbstractContextManager[httpx.Response]],
    retries: int = RETRIES,
    harmless: bool = False,
) -> Iterator[httpx.Response]:
    """The answer to a request, which is sent anew where that is safe.

    Args:
        send: sends it.
        retries: how often it is sent anew.
        harmless: whether it may run twice.
    """
    for tried in range(retries + 1):
        with ExitStack() as stack:
            try:
                response = stack.enter_context(send())
            except httpx.TransportError as error:
                wait = _pause(error, tried, harmless)
                if tried == retries or wait is None:
                    raise
            else:
                wait = _asked_pause(response)
                if tried == retries or wait is None:
                    yield response
                    return
        sleep(wait)


@asynccontextmanager
async def sending_async(
    send: Callable[[], AbstractAsyncContextManager[httpx.Response]], retries: int = RETRIES
) -> AsyncIterator[httpx.Response]:
    """As `sending`, on an event loop."""
    for tried in range(retries + 1):
        async with AsyncExitStack() as stack:
            try:
                response = await stack.enter_async_context(send())
            except httpx.TransportError as error:
                wait = _pause(error, tried)
                if tried == retries or wait is None:
                    raise
            else:
                wait = _asked_pause(response)
                if tried == retries or wait is None:
                    yield response
                    return
        await sleep_async(wait)


def _pause(error: httpx.TransportError, tried: int, harmless: bool = False) -> float | None:
    """Seconds to wait before a request that failed is sent anew; None if it must not be."""
    unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    again = unsent or (harmless and isinstance(error, httpx.NetworkError | httpx.ProtocolError))
    return _FIRST * 2**tried if again else None


def _asked_pause(response: httpx.Response) -> float | None:
    """Seconds that a busy server asks to wait; None if it does not, or asks for too many."""
    said = response.headers.get("retry-after", "").strip()
    if response.status_code not in _BUSY or not said:
        return None
    try:
        # A date is taken by the clock of who says it.
        now = None if said.isdecimal() else parsedate_to_datetime(response.headers["date"])
        seconds = (parsedate_to_datetime(said) - now).total_seconds() if now else float(said)
    except (KeyError, TypeError, ValueError):
        return None
    return max(seconds, 0.0) if seconds <= LONGEST else None

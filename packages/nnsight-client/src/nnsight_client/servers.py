"""The servers that one model's traces go to, each with one connection that is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nnsight_client.addresses import check_address
from nnsight_client.configuration import choose
from nnsight_client.keys import check_key

if TYPE_CHECKING:
    from nnsight_client.http_async_backend import HttpAsyncBackend
    from nnsight_client.http_backend import HttpBackend
    from nnsight_core.tree import ModelTree


class Servers:
    """Chooses the server of a trace.

    Args:
        url: the model's own server, if it has one.
        api_key: the key of that server, which no other is shown.
        tokenizer: gives the model's tokenizer if this process has loaded it.
        tree: gives the model's tree if it is known here.
        **connection: how servers are reached (`verify=`, `retries=`), and which model is asked for
            (`repo=`).

    Attributes:
        url: as given.

    Raises:
        ValueError: `url` is no address, or no header can hold the key.
    """

    def __init__(
        self,
        url: str | None,
        api_key: str | None,
        tokenizer: Callable[[], Any],
        tree: Callable[[], ModelTree | None],
        **connection: Any,
    ) -> None:
        self.url = None if url is None else check_address(url)
        self._api_key = check_key(api_key)
        self._tokenizer = tokenizer
        self._tree = tree
        self._connection = connection
        self._known: dict[tuple[str, str | None], HttpBackend] = {}
        self._async: dict[tuple[str, str | None], HttpAsyncBackend] = {}

    def chosen(self, arguments: dict[str, Any], mode: str = "sync") -> Any:
        """The backend that a trace's arguments name, or the model's own; None if there is none.

        Args:
            arguments: those that name a server are taken out of them.
            mode: as in `backend`.

        Raises:
            ValueError: they name two servers, or none that there is.
        """
        serve, api_key = arguments.pop("serve", None), arguments.pop("api_key", None)
        url, api_key = choose(serve, api_key, arguments.pop("remote", False))
        url = self.url if url is None else url
        return None if url is None else self.backend(url, api_key, mode)

    def backend(
        self, url: str, api_key: str | None = None, mode: str = "sync"
    ) -> HttpBackend | HttpAsyncBackend:
        """The backend that runs traces at an address.

        Args:
            mode: `async` for the one for asyncio.

        Raises:
            ValueError: `url` is no address.
        """
        from nnsight_client.http_backend import HttpBackend

        url = check_address(url)
        if api_key is None and url == self.url:
            api_key = self._api_key
        known = self._known.get((url, api_key))
        if known is None:
            known = HttpBackend(url, api_key, self._tokenizer, self._tree, **self._connection)
            self._known[url, api_key] = known
        if mode == "sync":
            return known
        from nnsight_client.http_async_backend import HttpAsyncBackend

        if (url, api_key) not in self._async:
            self._async[url, api_key] = HttpAsyncBackend(known, api_key)
        return self._async[url, api_key]

    def names(self) -> tuple[str, ...]:
        """By which names the model's own server knows its model, as far as it has said."""
        known = [server for (url, _), server in self._known.items() if url == self.url]
        return next((server.served.names for server in known if server.served.names), ())

    def close(self) -> None:
        """Close the connections."""
        for server in self._known.values():
            server.close()
        self._known.clear()
        self._async.clear()

    async def aclose(self) -> None:
        """As `close`, for the backends for asyncio."""
        for server in list(self._async.values()):
            await server.aclose()
        self.close()

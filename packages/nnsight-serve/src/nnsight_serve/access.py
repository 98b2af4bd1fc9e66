"""Who is let in: the keys of a server, each with a name."""

from __future__ import annotations

import hmac
from typing import Annotated

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from nnsight_core.errors import PolicyError
from nnsight_serve.refusals import Refused

_described = HTTPBearer(
    auto_error=False, description="A key of the server; any or none where it has no keys."
)


# FastAPI runs what is not async in a thread of its own, which takes longer than all this does.
async def check_key(
    request: Request,
    _: Annotated[HTTPAuthorizationCredentials | None, Security(_described)],
) -> None:
    """Let in who sends one of the server's keys; whose it is stays in `request.state.caller`.

    Raises:
        Refused: another key came, or none.
    """
    keys: dict[str, str] = request.app.state.settings.api_keys
    request.state.caller = ""
    if not keys:
        return
    authorization = request.headers.get("authorization", "")
    scheme, _space, given = authorization.partition(" ")
    # A header arrives as Latin-1, whatever its bytes mean.
    sent = given.strip(" \t").encode("latin-1")
    # Every key is compared, so that how long it takes tells nothing.
    whose = [name for name, key in keys.items() if hmac.compare_digest(sent, key.encode())]
    if scheme.lower() != "bearer" or not whose:
        seen = "The key is wrong" if authorization else "A key is needed"
        raise Refused(401, PolicyError(f"{seen}: this server takes `Authorization: Bearer KEY`."))
    request.state.caller = request.state.account.caller = whose[0]

"""What blocks may do on a server: anything (`trusted`), or what a list allows (`restricted`)."""

from fastapi import Request

from nnsight_core.policy import TRUSTED, TRUSTED_PATH, Policy
from nnsight_serve.policy.restricted import Restricted

RESTRICTED = Restricted()
POLICIES: dict[str, tuple[Policy, str]] = {
    "trusted": (TRUSTED, TRUSTED_PATH),
    "restricted": (RESTRICTED, "nnsight_serve.policy:RESTRICTED"),
}
"""Each policy by its name on the command line, and the path at which engines find it."""


def policy_of(request: Request) -> Policy:
    """The policy of the server that a request came to."""
    return POLICIES[request.app.state.settings.policy][0]


__all__ = ["POLICIES", "RESTRICTED", "Restricted", "policy_of"]

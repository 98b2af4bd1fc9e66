"""The policies that an engine of one's own may have, by the names that a server has for them."""

from __future__ import annotations

from nnsight_core.policy import TRUSTED_PATH, Policy, policy_at

# That one is in the server's package, which only an engine that asks for it needs.
_NAMED = {"trusted": TRUSTED_PATH, "restricted": "nnsight_serve.policy:RESTRICTED"}


def find_policy(name: str) -> tuple[str, Policy]:
    """A policy, with the import path at which workers find it.

    Args:
        name: `trusted`, `restricted`, or an import path.

    Raises:
        ImportError: it is in a package that is not here.
        ValueError: there is none of that name.
    """
    path = _NAMED.get(name, name)
    if ":" not in path:
        raise ValueError(
            f"policy={name!r}: it is 'trusted', 'restricted', or the import path of a policy, "
            "written `package.module:NAME`."
        )
    try:
        return path, policy_at(path)
    except ModuleNotFoundError as error:
        if name != "restricted" or (error.name or "").partition(".")[0] != "nnsight_serve":
            raise
        raise ImportError(
            "policy='restricted' needs the server's package: pip install nnsight-serve."
        ) from None

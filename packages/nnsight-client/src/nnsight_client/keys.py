"""Keys of servers, which no message shows."""

from __future__ import annotations


def check_key(key: str | None) -> str | None:
    """A key that a header can hold, or none.

    Raises:
        ValueError: it has what no header holds, such as the end of the line that it was read from.
    """
    if key is None:
        return None
    if key.endswith(("\n", "\r")):
        raise ValueError(
            "api_key ends with a line break, as a line of a file does. Give `api_key.strip()`."
        )
    if key != key.strip():
        raise ValueError("api_key begins or ends with a space. Give `api_key.strip()`.")
    for place, character in enumerate(key, 1):
        if not character.isprintable():
            raise ValueError(
                f"api_key holds U+{ord(character):04X} as its character {place}, which no header "
                "can hold. Give the key alone."
            )
    return key

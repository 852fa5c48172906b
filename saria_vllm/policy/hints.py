"""What a client says of its request, in `kv_transfer_params`: {"saria": {"session": "a7", "last": true}}."""

from __future__ import annotations

from typing import NamedTuple

KEY = "saria"

SESSION_CHARS_MAX = 128


class Hints(NamedTuple):
    """All optional. None changes what a tier holds for others, or which bytes are right."""

    session: str = ""
    """The conversation thread that the request belongs to: each request of it continues or replaces the one before.
    Empty: not said."""
    last: bool = False
    """No request of this session comes after it."""
    no_store: bool = False
    """Nothing of it is stored."""
    no_load: bool = False
    """No hit of a tier is offered to it."""


NO_HINTS = Hints()


def parse_hints(said: object) -> tuple[Hints, list[str]]:
    """Hints as far as they can be understood, and of each that cannot what was expected. JSON's null says nothing."""
    if said is None:
        return NO_HINTS, []
    if not isinstance(said, dict):
        return NO_HINTS, [f"expected an object with any of {', '.join(Hints._fields)}"]
    wrong = []
    if any(key not in Hints._fields for key in said):
        wrong.append(f"unknown key; expected any of {', '.join(Hints._fields)}")
    taken: dict[str, str | bool] = {}
    for key in Hints._fields:
        value = said.get(key)
        if value is None:
            continue
        if key == "session":
            if isinstance(value, str) and 0 < len(value) <= SESSION_CHARS_MAX:
                taken[key] = value
            else:
                wrong.append(f"session: expected a string of 1 to {SESSION_CHARS_MAX} characters")
        elif isinstance(value, bool):
            taken[key] = value
        else:
            wrong.append(f"{key}: expected true or false")
    return NO_HINTS._replace(**taken), wrong  # type: ignore[arg-type]

"""What an argument must do, and why something failed, each said in one way."""

from __future__ import annotations


def require(
    holds: object, argument: str, rule: str, got: object, error: type[Exception] = ValueError
) -> None:
    """Raise an error that names argument, rule and received value, unless something holds."""
    if not holds:
        raise error(f"{argument} must {rule}, got {got}")


def first_line(error: BaseException) -> str:
    """What an error says first; the name of its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

"""What an argument must do, said in one way."""

from __future__ import annotations


def require(
    holds: object, argument: str, rule: str, got: object, error: type[Exception] = ValueError
) -> None:
    """Raise an error that names argument, rule and received value, unless something holds."""
    if not holds:
        raise error(f"{argument} must {rule}, got {got}")

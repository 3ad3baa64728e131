"""What a built dpa needs: the torch that it was built against, to the minor version.

A provider of dynamic metadata for scikit-build-core.
"""

from importlib import metadata


def dynamic_metadata(field: str, settings: dict | None = None) -> list[str]:
    """Return the dependencies; a source distribution made where there is no torch takes any."""
    try:
        minor = ".".join(metadata.version("torch").split(".")[:2])
        torch = f"torch=={minor}.*"
    except metadata.PackageNotFoundError:
        torch = "torch>=2.9"
    return [torch, "numpy", "rich", "typer"]

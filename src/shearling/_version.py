"""The one place the version is written."""

__version__ = "0.2.0"


def versions() -> dict[str, str]:
    """The software a result depends on."""
    import platform
    from importlib import metadata

    found = {"shearling": __version__, "python": platform.python_version()}
    return found | {name: metadata.version(name) for name in ("torch", "transformers")}

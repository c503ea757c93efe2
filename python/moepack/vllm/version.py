"""The versions of vLLM that the plugin supports.

The plugin depends on interfaces that vLLM changes between releases. A version outside of the range is refused when a
packed directory is opened; other models are not affected.
"""

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

__all__ = ["SUPPORTED", "unsupported"]

SUPPORTED = SpecifierSet(">=0.32,<0.34")
"""The versions that have the interfaces that the plugin uses."""


def unsupported(version: str) -> str | None:
    """Return why a version of vLLM is refused; None if it is supported.

    Development versions count as the release that they precede. A source tree without a version is accepted.
    """
    try:
        release = Version(version).base_version
    except InvalidVersion:
        return None
    if release in SUPPORTED:
        return None
    lowest, below = sorted((each.version for each in SUPPORTED), key=Version)
    return f"moepack supports vLLM from {lowest} to below {below}, but vLLM {version} is installed"

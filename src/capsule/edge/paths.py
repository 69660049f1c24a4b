"""Names of files that come from a client's own file system or editor."""

from __future__ import annotations

from capsule.edge.errors import invalid_field
from capsule.settings import brief


def inside_workspace(path: str, *, field: str) -> str:
    """A relative name that stays below /workspace, without parts that say nothing. Where it leads
    is decided inside the sandbox. Raises InvalidError."""
    if path.startswith("/"):
        raise invalid_field(field, f"{brief(path)} is absolute, must be relative to /workspace")
    words = [word for word in path.split("/") if word not in ("", ".")]
    if ".." in words:
        raise invalid_field(field, f"{brief(path)} has a '..' component")
    if not words or "\0" in path:
        raise invalid_field(field, f"{brief(path)} is no file's name")
    if any(len(word.encode("utf-8", "surrogateescape")) > 255 for word in words):
        raise invalid_field(field, f"{brief(path)} has a name of more than 255 bytes")
    return "/".join(words)

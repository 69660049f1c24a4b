"""What clients of sessions send, as types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from capsule.edge import shapes as s

SessionId = Annotated[str, Meta(min_length=1, max_length=64)]
EnvironmentName = Annotated[str, Meta(min_length=1, max_length=128)]


class BeginSession(s.Shape, kw_only=True, frozen=True):
    provider: s.Word | None = None
    environment: EnvironmentName | None = None
    agent: s.Word | None = None
    session_id: s.Name | None = None
    limits: s.LimitsShape | None = None
    env: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    idle_timeout_ms: s.Millis | None = None


class ExecuteInSession(s.Shape, kw_only=True, frozen=True):
    session_id: SessionId
    code: str
    language: s.Word | None = None
    timeout_ms: s.Millis | None = None


class SessionFile(s.Shape, kw_only=True, frozen=True):
    path: s.Path
    content: str
    encoding: s.Encoding = "text"


class WriteSessionFiles(s.Shape, kw_only=True, frozen=True):
    """One file, or several as `files`."""

    session_id: SessionId
    path: s.Path | None = None
    content: str | None = None
    encoding: s.Encoding = "text"
    files: Annotated[list[SessionFile], Meta(max_length=1000)] = field(default_factory=list)


class CallTool(s.Shape, kw_only=True, frozen=True):
    arguments: dict[str, Any] = field(default_factory=dict)


Format = Literal["capsule", "openai", "anthropic"]

"""From what somebody asks for to what a session's sandbox is made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from capsule.config import Config
from capsule.errors import InvalidError, NotFoundError
from capsule.registry_file import Agent, Environment, seconds_of
from capsule.service import Service, validate
from capsule.service.template_names import resolve, shown, visible
from capsule.sessions.registry import Registry
from capsule.settings import brief

DEFAULT_ENVIRONMENT = "python"
# What clients of the E2B API call a provider. Without a key for that cloud it is the server's own.
CLOUD = "e2b"


@dataclass(frozen=True, slots=True)
class Wish:
    """A new session. What is None is the agent's, the environment's or the server's to say."""

    environment: str | None = None
    provider: str | None = None
    agent: str | None = None
    session_id: str | None = None
    limits: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    idle_timeout: float | None = None


class Plan(NamedTuple):
    environment: str
    template: str
    provider: str | None
    language: str | None
    agent: str
    limits: Mapping[str, Any]
    env: Mapping[str, str]
    idle_timeout: float


async def make_plan(
    wish: Wish,
    registry: Registry,
    service: Service,
    config: Config,
    providers: Collection[str],
    tenant: str,
) -> Plan:
    """`providers` are the names of those that there are, `tenant` is whose templates there are.

    Raises NotFoundError (agent, environment), InvalidError, TooLargeError.
    """
    await registry.fresh()
    agent = registry.get(Agent, wish.agent) if wish.agent is not None else None
    name = wish.environment or (agent.environment if agent else DEFAULT_ENVIRONMENT)
    place = registry.environment(name) or await _of_template(name, registry, service, tenant)
    idle = _first(
        wish.idle_timeout,
        seconds_of(agent.idle_timeout) if agent else None,
        seconds_of(place.idle_timeout),
        min(config.session_idle_timeout, longest_idle(config)),
    )
    if agent is not None and agent.network != place.network:
        raise InvalidError(
            f"agent {agent.name} wants the network {brief(agent.network)}, environment"
            f" {place.name} has {brief(place.network)}",
            field="agent",
        )
    validate.metadata(wish.metadata)
    return Plan(
        environment=place.name,
        template=place.template,
        provider=_provider(wish.provider or place.provider, providers),
        language=place.language,
        agent=agent.name if agent else "",
        limits={**place.limits, **(agent.limits if agent else {}), **(wish.limits or {})},
        env={**place.env, **(agent.env if agent else {}), **wish.env},
        idle_timeout=validate.seconds("idle_timeout", idle, 1.0, longest_idle(config)),
    )


def longest_idle(config: Config) -> float:
    """Its sandbox has to live until the session is closed, or its files would end with it."""
    return config.max_ttl - min(60.0, config.max_ttl / 10)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


async def _of_template(name: str, registry: Registry, service: Service, tenant: str) -> Environment:
    """Every template is an environment, without a file of its own."""
    catalog = await service.templates.fresh()
    if resolve(catalog, name, tenant) is None:
        templates = {shown(each.name) for each in visible(catalog, tenant)}
        known = sorted({*(each.name for each in registry.all(Environment)), *templates})
        raise NotFoundError(
            f"environment {brief(name)} does not exist",
            hint=f"take one of: {', '.join(known)}",
            field="environment",
        )
    return Environment(name=name, template=name)


def _provider(name: str | None, known: Collection[str]) -> str | None:
    return None if name == CLOUD and CLOUD not in known else name

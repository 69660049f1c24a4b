"""Every setting of the server, in one frozen value.

A setting comes from, strongest first: an override in code (the command line), an environment
variable (`CAPSULE_` + its name in capitals), the YAML file that `CAPSULE_CONFIG` names, its
default. Lists are separated by commas in the environment; `max_limits` is a mapping in the file
and one variable per limit in the environment (`CAPSULE_MAX_LIMITS_MEMORY`). Sizes take `512MiB`,
times `10m`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from capsule.config_checks import (
    API_KEY_MIN,
    RUN_DIR_MAX,
    check_together,
    default_dirs,
    is_loopback,
)
from capsule.errors import ForbiddenError
from capsule.model import GIB, MIB, Isolation, Limits
from capsule.settings import about, check, unknown
from capsule.sources import PREFIX, read_env, read_file
from capsule.tenant_settings import TenantSettings

_DAY = 86400.0
_YEARS = 3650 * _DAY
_UNSET = Path()  # the directories depend on who runs the server: see default_dirs
_LEVELS = tuple(level.value for level in Isolation if level is not Isolation.NONE)

_LIMITS = {
    "memory": about("bytes", "bytes of memory", low=16 * MIB, high=1024 * GIB),
    "cpus": about("number", "cores; a fraction is fine", low=0.01, high=1024),
    "processes": about("integer", "processes and threads", low=4, high=4_194_304),
    "disk": about("bytes", "bytes in the writable layer", low=MIB, high=1024 * 1024 * GIB),
    "inodes": about("integer", "files and folders in the writable layer", low=64, high=2**40),
    "open_files": about("integer", "open files per process", low=16, high=1_048_576),
}
_MAX_LIMITS = Limits(
    memory=16 * GIB,
    cpus=64.0,
    processes=32_768,
    disk=100 * GIB,
    inodes=16_777_216,
    open_files=4096,
)

__all__ = ["Config", "Setting", "check_exposure", "check_limit", "default_dirs", "is_loopback"]
__all__ += ["RUN_DIR_MAX", "load_config", "settings"]


class Setting(NamedTuple):
    """One line of the configuration reference."""

    name: str
    env: str
    type: str
    default: Any
    help: str


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Config(TenantSettings):
    host: str = field(
        default="127.0.0.1",
        metadata=about("text", "address to listen on; beyond loopback keys are needed"),
    )
    port: int = field(
        default=8080,
        metadata=about("integer", "port to listen on; 0: any free one", low=0, high=65535),
    )
    api_keys: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "list",
            f"keys that may use the API, each of {API_KEY_MIN} printable ASCII characters or more; "
            "none: no key is asked for",
            secret=True,
        ),
    )
    allowed_hosts: tuple[str, ...] = field(
        default=(),
        metadata=about("list", "names the server is reached by, beside those of loopback"),
    )
    sandbox_domain: str | None = field(
        default=None,
        metadata=about(
            "text",
            "name below which the ports of sandboxes are reached, as PORT-ID.NAME[:PORT]; without "
            "it, the one that a request for a sandbox came to",
            optional=True,
        ),
    )
    allowed_origins: tuple[str, ...] = field(
        default=(),
        metadata=about("list", "origins of web pages that may call it, beside its own"),
    )
    data_dir: Path = field(
        default=_UNSET,
        metadata=about("path", "where records, images and disks are kept"),
    )
    run_dir: Path = field(
        default=_UNSET,
        metadata=about(
            "path",
            f"where boxes have their sockets; at most {RUN_DIR_MAX} bytes long."
            " A box whose socket is gone from there ends",
        ),
    )
    provider: str = field(
        default="local",
        metadata=about("text", "provider of sandboxes that name none"),
    )
    min_isolation: Isolation = field(
        default=Isolation.LANDLOCK,
        metadata=about("choice", "refuse to start below this level", choices=_LEVELS),
    )
    isolation: Isolation | None = field(
        default=None,
        metadata=about(
            "choice",
            "use this level even if the host can do better; for the local provider",
            choices=("namespaces", "landlock"),
            optional=True,
        ),
    )
    disk_backing: str = field(
        default="auto",
        metadata=about(
            "choice", "what a sandbox's disk is made of", choices=("auto", "loop", "memory")
        ),
    )
    cgroup_scope: str = field(
        default="auto",
        metadata=about(
            "choice",
            "auto: where the server's own cgroup cannot hold sandboxes, ask systemd for a scope;"
            " never: do not, and enforce less",
            choices=("auto", "never"),
        ),
    )
    docker_host: str | None = field(
        default=None,
        metadata=about(
            "text",
            "where the Docker Engine is, such as unix:///run/docker.sock or tcp://host:2376; "
            "unset: DOCKER_HOST, the docker command's context, the usual sockets",
            optional=True,
        ),
    )
    docker_runtime: str | None = field(
        default=None,
        metadata=about(
            "text",
            "runtime of containers when neither template nor request names one; "
            "unset: the Engine's default",
            optional=True,
        ),
    )
    docker_transport: str = field(
        default="auto",
        metadata=about(
            "choice",
            "how agents in containers are reached: by their own sockets, or through the Engine",
            choices=("auto", "socket", "engine"),
        ),
    )
    docker_pull: str = field(
        default="missing",
        metadata=about("choice", "whether a missing image is pulled", choices=("missing", "never")),
    )
    docker_image: str = field(
        default="capsule/{template}:latest",
        metadata=about("text", "image of templates that name none; {template} is their name"),
    )
    templates_dir: Path | None = field(
        default=None,
        metadata=about("path", "folder with further templates", optional=True),
    )
    max_builds: int = field(
        default=2,
        metadata=about(
            "integer", "images built at the same time; 0: the API builds none", low=0, high=1000
        ),
    )
    build_timeout: float = field(
        default=1800.0,
        metadata=about("seconds", "time a build gets", low=1.0, high=_DAY),
    )
    build_memory: int = field(
        default=4 * GIB,
        metadata=about("bytes", "memory of each step of a build; 0: no limit", low=0),
    )
    build_network: str = field(
        default="default",
        metadata=about("text", "network of a build's steps, as the Engine names it, such as none"),
    )
    max_context: int = field(
        default=256 * MIB,
        metadata=about("bytes", "largest build context", low=1024, high=1024 * GIB),
    )
    max_sandboxes: int = field(
        default=1024,
        metadata=about("integer", "sandboxes at the same time", low=1, high=1_000_000),
    )
    max_launches: int = field(
        default=0,
        metadata=about(
            "integer",
            "sandboxes started at the same time under one provider, the rest wait in line; "
            "0: eight per core",
            low=0,
            high=10_000,
        ),
    )
    pool_max: int = field(
        default=0,
        metadata=about(
            "integer",
            "boxes kept ready for each template and provider that is used, as many as are needed "
            "up to this; 0: none",
            low=0,
            high=10_000,
        ),
    )
    pool_min: int = field(
        default=0,
        metadata=about(
            "integer",
            "boxes kept ready for each of pool_templates, also while nobody needs them",
            low=0,
            high=10_000,
        ),
    )
    pool_templates: tuple[str, ...] = field(
        default=("python",),
        metadata=about(
            "list",
            "templates that pool_min is for, each as NAME, NAME@PROVIDER or NAME@PROVIDER:RUNTIME",
        ),
    )
    pool_memory: int | None = field(
        default=None,
        metadata=about(
            "bytes",
            "what all ready boxes together may cost the machine; unset: an eighth of its memory, "
            "or of what a container may use",
            low=0,
            optional=True,
        ),
    )
    max_execs: int = field(
        default=1024,
        metadata=about("integer", "execs at the same time, in all sandboxes", low=1, high=100_000),
    )
    max_execs_per_sandbox: int = field(
        default=256,
        metadata=about("integer", "execs at the same time in one sandbox", low=1, high=256),
    )
    ttl: float = field(
        default=600.0,
        metadata=about("seconds", "life of a sandbox when nobody says otherwise", low=1.0),
    )
    max_ttl: float = field(
        default=_DAY,
        metadata=about("seconds", "longest life that may be asked for", low=1.0, high=_YEARS),
    )
    idle_timeout: float = field(
        default=0.0,
        metadata=about(
            "seconds", "end a sandbox unused for this long; 0: never", low=0.0, high=_YEARS
        ),
    )
    paused_ttl: float = field(
        default=7 * _DAY,
        metadata=about(
            "seconds",
            "how long a sandbox that is paused at its timeout is kept",
            low=1.0,
            high=_YEARS,
        ),
    )
    exec_timeout: float = field(
        default=30.0,
        metadata=about("seconds", "time an exec gets when nobody says otherwise", low=0.001),
    )
    max_exec_timeout: float = field(
        default=3600.0,
        metadata=about("seconds", "longest time an exec may ask for", low=0.001, high=_YEARS),
    )
    output_limit: int = field(
        default=10 * MIB,
        metadata=about("bytes", "bytes kept of each output stream of an exec", low=1),
    )
    max_output_limit: int = field(
        default=256 * MIB,
        metadata=about("bytes", "largest output_limit to ask for", low=1, high=64 * GIB),
    )
    answer_memory: int = field(
        default=24 * MIB,
        metadata=about(
            "bytes",
            "memory for large answers, all together; the rest waits",
            low=MIB,
            high=GIB * 64,
        ),
    )
    max_body: int = field(
        default=16 * MIB,
        metadata=about(
            "bytes", "largest body of a request that is no upload of files", low=1024, high=GIB
        ),
    )
    max_upload: int = field(
        default=0,
        metadata=about("bytes", "largest upload; 0: what the sandbox's disk allows", low=0),
    )
    playground_idle_timeout: float = field(
        default=1800.0,
        metadata=about(
            "seconds", "end a playground's container unused for this long", low=1.0, high=_YEARS
        ),
    )
    metrics: str = field(
        default="keys",
        metadata=about(
            "choice",
            "who may read /metrics: admins (everybody, if there are no keys), anyone, or nobody",
            choices=("keys", "anyone", "nobody"),
        ),
    )
    webhook_targets: str = field(
        default="public",
        metadata=about(
            "choice",
            "where webhooks may lead: to public addresses alone, or also into your own network",
            choices=("public", "any"),
        ),
    )
    otel_endpoint: str | None = field(
        default=None,
        metadata=about(
            "text",
            "where traces go: an OTLP collector, http://localhost:4318 for instance",
            optional=True,
        ),
    )
    metrics_sandboxes: int = field(
        default=50,
        metadata=about(
            "integer", "sandboxes that /metrics tells of one by one, oldest first", low=0, high=1000
        ),
    )
    max_snapshot: int = field(
        default=16 * GIB,
        metadata=about("bytes", "most that one snapshot may add to those below it", low=MIB),
    )
    drain: str = field(
        default="keep",
        metadata=about(
            "choice", "what a graceful stop does with sandboxes", choices=("keep", "delete")
        ),
    )
    drain_timeout: float = field(
        default=10.0,
        metadata=about("seconds", "how long a graceful stop waits for execs", low=0.0, high=3600.0),
    )
    log_level: str = field(
        default="info",
        metadata=about(
            "choice", "least severe message to log", choices=("debug", "info", "warning", "error")
        ),
    )
    log_format: str = field(
        default="auto",
        metadata=about(
            "choice", "auto: text on a terminal, else JSON", choices=("auto", "json", "text")
        ),
    )
    log_requests: str = field(
        default="no",
        metadata=about(
            "choice",
            "whether to log each request, and what happens to sandboxes",
            choices=("no", "yes"),
        ),
    )
    max_limits: Limits = field(
        default=_MAX_LIMITS, metadata=about("limits", "the most one sandbox may have:")
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value == _UNSET and f.default == _UNSET:
                value = default_dirs(os.environ)[f.name]
            object.__setattr__(self, f.name, check(f"setting {f.name}", f.metadata, value))
        check_together(self)

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{f.name}={self._shown(f)}' for f in fields(self))})"

    def _shown(self, f: Field[Any]) -> str:
        value = getattr(self, f.name)
        return "<secret>" if f.metadata["secret"] and value else repr(value)

    @property
    def takes_tokens(self) -> bool:
        return bool(self.jwt_secret or self.jwt_public_key or self.jwt_jwks_url)


def load_config(
    env: Mapping[str, str] = os.environ, file: Path | str | None = None, **overrides: Any
) -> Config:
    """Raises InvalidError naming the setting, the value and what is allowed."""
    values: dict[str, Any] = dict(default_dirs(env))
    if source := (file or env.get("CAPSULE_CONFIG")):
        _merge(values, read_file(Path(source)), str(source))
    _merge(values, read_env(env, _LIMITS), "the environment")
    _merge(values, {k: v for k, v in overrides.items() if v is not None}, "the call")
    return Config(**values)


def settings() -> list[Setting]:
    """Every setting, for the reference and the test that compares it with this."""
    found: list[Setting] = []
    inherited = TenantSettings.__dataclass_fields__  # told last
    for f in sorted(fields(Config), key=lambda f: f.name in inherited):
        env, help = PREFIX + f.name.upper(), f.metadata["help"]
        if f.metadata["kind"] == "limits":
            found += [
                Setting(
                    f"{f.name}.{limit}",
                    f"{env}_{limit.upper()}",
                    what["kind"],
                    getattr(f.default, limit),
                    f"{help} {what['help']}",
                )
                for limit, what in _LIMITS.items()
            ]
            continue
        kind = " | ".join(f.metadata["choices"]) or f.metadata["kind"]
        found.append(Setting(f.name, env, kind, None if f.default == _UNSET else f.default, help))
    return found


def check_exposure(config: Config, *, stored: bool = False) -> None:
    """Raises ForbiddenError when the server would listen to others, and nobody has a key to it.

    `stored`: there are keys besides those of the configuration.
    """
    known = config.api_keys or config.takes_tokens or stored
    if not known and not is_loopback(config.host):
        raise ForbiddenError(
            f"refusing to listen on {config.host!r} without API keys",
            hint="make one with `capsule key create`, set CAPSULE_API_KEYS, or listen on 127.0.0.1",
            field="host",
        )


def check_limit(name: str, value: Any, most: Limits) -> Any:
    """One limit that somebody asks for, at most as in `most`. Raises InvalidError."""
    if name not in _LIMITS:
        raise unknown(name, _LIMITS, "limit")
    return check(f"limits.{name}", {**_LIMITS[name], "high": getattr(most, name)}, value)


def _merge(values: dict[str, Any], new: Mapping[str, Any], source: str) -> None:
    known = {f.name: f.default for f in fields(Config)}
    for key, value in new.items():
        if key not in known:
            raise unknown(key, known, f"setting in {source}")
        if key == "max_limits" and isinstance(value, Mapping):
            value = _merge_limits(values.get(key, known[key]), value)
        values[key] = value


def _merge_limits(base: Limits, new: Mapping[Any, Any]) -> Limits:
    merged = {name: getattr(base, name) for name in _LIMITS}
    for key, value in new.items():
        if key not in merged:
            raise unknown(str(key), merged, "limit in max_limits")
        merged[key] = check(f"setting max_limits.{key}", _LIMITS[key], value)
    return Limits(**merged)

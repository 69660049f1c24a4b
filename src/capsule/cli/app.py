"""Every command with its options. The work is in the modules beside this one, loaded when used:
`capsule run` must not wait for what only `capsule serve` needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule.cli import options as o
from capsule.cli import show
from capsule.cli.audit_commands import audit
from capsule.cli.key_commands import key
from capsule.cli.snapshot_commands import diff, fork, snapshot, steps, undo
from capsule.cli.template_commands import template
from capsule.cli.tenant_commands import tenant
from capsule.cli.volume_commands import parse, volume

app = typer.Typer(
    name="capsule",
    help="Run untrusted code safely on your own machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(template, name="template")
app.add_typer(snapshot, name="snapshot")
app.add_typer(volume, name="volume")
app.add_typer(audit, name="audit")
app.add_typer(key, name="key")
app.add_typer(tenant, name="tenant")
for command in (fork, steps, diff, undo):
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def capsule(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Run untrusted code safely on your own machine."""


@app.command()
def run(
    code: Annotated[
        str,
        typer.Argument(
            metavar="CODE|FILE|-",
            help="A script's path, the code itself, or - to read the code from standard input.",
        ),
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS...]", help="The program's arguments.")
    ] = None,
    template: o.Template = None,
    language: Annotated[
        str | None, typer.Option("--language", "-l", help="One of the template's languages.")
    ] = None,
    timeout: o.Timeout = None,
    memory: o.Memory = None,
    cpus: o.Cpus = None,
    disk: o.Disk = None,
    processes: o.Processes = None,
    provider: o.Provider = None,
    runtime: o.Runtime = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="Copy a file or folder to /workspace; repeatable."),
    ] = None,
    env: o.Env = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Pass on what is typed at the terminal.")
    ] = False,
    json: o.Json = False,
) -> int:
    """Run code in a sandbox of its own, without a server, and exit with the program's exit code.

    An argument that names an existing file is a script; so is a single word that ends in .py, .js,
    .mjs, .go or .sh (an error if there is no such file). Anything else is code.
    """
    show.quiet_logs()
    from capsule.cli.run import Job, run_job

    limits = {"memory": memory, "cpus": cpus, "disk": disk, "processes": processes}
    return run_job(
        Job(
            source=code,
            args=tuple(args or ()),
            template=template,
            language=language,
            timeout=timeout,
            limits={name: limit for name, limit in limits.items() if limit is not None},
            provider=provider,
            runtime=runtime,
            files=tuple(file or ()),
            env=o.pairs(env),
            interactive=interactive,
            json=json,
        )
    )


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="0: any free one.")] = None,
    drain: Annotated[
        str | None, typer.Option(help="What a stop does with sandboxes: keep or delete.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A YAML file.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    json: o.Json = False,
) -> int:
    """Serve the API: JSON-RPC on /rpc, REST under /v1, terminals on /terminal."""
    from capsule.cli.serve import serve_command

    overrides = {"host": host, "port": port, "drain": drain, "log_level": log_level}
    return serve_command(config, overrides, as_json=json)


@app.command()
def create(
    template: Annotated[
        str, typer.Argument(help="What to start from.", autocompletion=o.complete_template)
    ] = "python",
    ttl: o.Ttl = None,
    idle_timeout: o.IdleTimeout = None,
    memory: o.Memory = None,
    cpus: o.Cpus = None,
    disk: o.Disk = None,
    processes: o.Processes = None,
    provider: o.Provider = None,
    runtime: o.Runtime = None,
    env: o.Env = None,
    metadata: Annotated[
        list[str] | None, typer.Option("--metadata", metavar="K=V", help="A label; repeatable.")
    ] = None,
    snapshot: Annotated[
        str | None, typer.Option(help="Begin from the files of this snapshot.")
    ] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:PATH[:ro]", help="Mount a volume; repeatable."),
    ] = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Leave a restore point after each exec and run.")
    ] = False,
    on_timeout: Annotated[
        str | None, typer.Option(help="At the end of its time: delete (default) or pause.")
    ] = None,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="Wake it when it is used while paused.")
    ] = False,
    ports: Annotated[
        str | None,
        typer.Option(help="Who may open what listens in it: private (default) or public."),
    ] = None,
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Create a sandbox on the server and print its id."""
    from capsule.cli import remote

    return remote.create(
        remote.Server(url, api_key),
        template,
        {
            "ttl": ttl,
            "idle_timeout": idle_timeout,
            "memory": memory,
            "cpus": cpus,
            "disk": disk,
            "processes": processes,
            "provider": provider,
            "runtime": runtime,
            "env": o.pairs(env),
            "metadata": o.pairs(metadata, option="--metadata"),
            "snapshot": snapshot,
            "checkpoint": "each" if checkpoint else None,
            "volumes": parse(volume),
            "on_timeout": on_timeout,
            "auto_resume": auto_resume or None,
            "ports": ports,
        },
        as_json=json,
    )


@app.command("ls")
def list_sandboxes(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the ids.")] = False,
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """List the server's sandboxes."""
    from capsule.cli import remote

    return remote.list_sandboxes(remote.Server(url, api_key), quiet=quiet, as_json=json)


@app.command()
def reset(
    id: o.SandboxId, url: o.Url = None, api_key: o.ApiKey = None, json: o.Json = False
) -> int:
    """Give a sandbox back its template's state: no programs, no files, the same id."""
    from capsule.cli import remote

    return remote.reset(remote.Server(url, api_key), id, as_json=json)


@app.command()
def pool(url: o.Url = None, api_key: o.ApiKey = None, json: o.Json = False) -> int:
    """Show what the server has ready, and who waits."""
    from capsule.cli import remote

    return remote.pool(remote.Server(url, api_key), as_json=json)


@app.command(
    "exec", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False}
)
def exec_program(
    id: o.SandboxId,
    cmd: o.Program,
    timeout: o.Timeout = None,
    env: o.Env = None,
    cwd: o.Cwd = None,
    session: Annotated[
        str | None, typer.Option(help="Keep environment and directory for the next call.")
    ] = None,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Give it this terminal.")] = False,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Pass on what is typed at the terminal.")
    ] = False,
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Run a program in a sandbox and exit with its exit code. Options come before the ID."""
    from capsule.cli import remote

    argv = tuple(cmd[1:] if cmd[0] == "--" else cmd)
    if not argv:
        raise typer.BadParameter("name the program to run")
    if tty and json:
        raise typer.BadParameter("--tty and --json exclude each other")
    call = remote.Program(
        argv,
        env=o.pairs(env),
        cwd=cwd,
        timeout=timeout,
        session=session,
        tty=tty,
        interactive=interactive,
    )
    return remote.exec_program(remote.Server(url, api_key), id, call, as_json=json)


@app.command()
def shell(
    id: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]",
            help="The sandbox; without it, a new one that is deleted afterwards.",
            autocompletion=o.complete_sandbox,
        ),
    ] = None,
    template: o.Template = None,
    name: Annotated[str, typer.Option(help="The same name leads to the same shell.")] = "main",
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """An interactive shell. Leave it with exit; with Enter ~ . if the connection hangs."""
    from capsule.cli.remote import Server
    from capsule.cli.shell import open_shell

    return open_shell(Server(url, api_key), id, template or "python", name, as_json=json)


@app.command()
def cp(
    source: Annotated[
        str, typer.Argument(help="A local path, ID:/path in a sandbox, or - (stdin).")
    ],
    target: Annotated[
        str, typer.Argument(help="A local path, ID:/path in a sandbox, or - (stdout).")
    ],
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Copy files and folders into a sandbox, or out of it."""
    from capsule.cli.cp import copy
    from capsule.cli.remote import Server

    return copy(Server(url, api_key), source, target, as_json=json)


@app.command()
def pause(
    ids: o.Sandboxes, url: o.Url = None, api_key: o.ApiKey = None, json: o.Json = False
) -> int:
    """Let everything in sandboxes stand still; memory and processes are kept."""
    from capsule.cli import remote

    return remote.shift(remote.Server(url, api_key), ids, "pause", as_json=json)


@app.command()
def resume(
    ids: o.Sandboxes, url: o.Url = None, api_key: o.ApiKey = None, json: o.Json = False
) -> int:
    """Let paused sandboxes go on."""
    from capsule.cli import remote

    return remote.shift(remote.Server(url, api_key), ids, "resume", as_json=json)


@app.command()
def rm(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID...", help="Sandboxes.", autocompletion=o.complete_sandbox),
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="Every sandbox of the server.")] = False,
    url: o.Url = None,
    api_key: o.ApiKey = None,
    json: o.Json = False,
) -> int:
    """Delete sandboxes."""
    from capsule.cli import remote

    if bool(ids) == all:
        raise typer.BadParameter("name the sandboxes, or use --all")
    return remote.remove(remote.Server(url, api_key), ids or [], all=all, as_json=json)


@app.command()
def doctor(
    json: o.Json = False,
    apparmor: Annotated[
        bool,
        typer.Option(
            "--apparmor", help="Print the AppArmor profile that lets the agent make namespaces."
        ),
    ] = False,
) -> int:
    """What this machine can do, level by level; for what it cannot, the reason and the fix."""
    show.quiet_logs()
    from capsule.cli.doctor import examine, print_apparmor

    return print_apparmor() if apparmor else examine(as_json=json)


@app.command()
def version(json: o.Json = False) -> int:
    """Print the version."""
    from importlib.metadata import version as installed

    number = installed("capsule-sandbox")
    if json:
        show.as_json({"version": number})
    else:
        print(f"capsule {number}")
    return 0


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")], json: o.Json = False
) -> int:
    """Print the script that completes commands. For bash: source <(capsule completion bash)"""
    from capsule.cli.completion import script, shells

    if shell not in shells():
        raise typer.BadParameter(f"no completion for {shell!r}; there is {', '.join(shells())}")
    text = script(shell)
    if json:
        show.as_json({"shell": shell, "script": text})
    else:
        print(text)
    return 0

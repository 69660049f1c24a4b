"""`capsule template …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule.cli import options as o
from capsule.cli import show

template = typer.Typer(no_args_is_help=True, help="What sandboxes start from.")


@template.command("ls")
def template_ls(json: o.Json = False) -> int:
    """List the templates."""
    from capsule.cli import templates

    return templates.list_templates(as_json=json)


@template.command("show")
def template_show(
    name: Annotated[str, typer.Argument(help="A template.", autocompletion=o.complete_template)],
    json: o.Json = False,
) -> int:
    """Everything about one template."""
    from capsule.cli import templates

    return templates.show_template(name, as_json=json)


@template.command("build")
def template_build(
    target: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FOLDER",
            help="One that Capsule brings a Dockerfile for, or a folder with your own.",
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Default: the folder's name.")] = None,
    file: Annotated[
        str, typer.Option("--file", "-f", help="The Dockerfile, relative to the folder.")
    ] = "Dockerfile",
    build_arg: Annotated[
        list[str] | None,
        typer.Option("--build-arg", metavar="K=V", help="A build argument; repeatable."),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Run every step again.")] = False,
    pull: Annotated[bool, typer.Option("--pull", help="Look for newer base images.")] = False,
    provider: o.ImageProvider = None,
    json: o.Json = False,
) -> int:
    """Build a template's image with the Docker Engine, and make it a template."""
    show.quiet_logs()
    from capsule.cli.building import Order, build_image

    order = Order(
        target,
        name=name,
        file=file,
        args=o.pairs(build_arg, option="--build-arg"),
        cache=not no_cache,
        pull=pull,
        provider=provider,
    )
    return build_image(order, as_json=json)


@template.command("import")
def template_import(
    archive: Annotated[Path, typer.Argument(help="From `docker save`, or an OCI layout, as tar.")],
    name: Annotated[str | None, typer.Option(help="Default: the archive's name.")] = None,
    replace: Annotated[bool, typer.Option(help="Replace one of the same name.")] = False,
    provider: o.ImageProvider = None,
    json: o.Json = False,
) -> int:
    """Unpack an image and make it a template."""
    show.quiet_logs()
    from capsule.cli import templates

    return templates.import_image(archive, name, provider=provider, replace=replace, as_json=json)


@template.command("export")
def template_export(
    name: Annotated[str, typer.Argument(help="A template.", autocompletion=o.complete_template)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: the template's name and .tar.")
    ] = None,
    provider: o.ImageProvider = None,
    json: o.Json = False,
) -> int:
    """Write a template's image to a file, for another provider or another machine."""
    show.quiet_logs()
    from capsule.cli import templates

    return templates.export_image(name, output, provider=provider, as_json=json)


@template.command("rm")
def template_rm(
    name: Annotated[str, typer.Argument(help="A template.", autocompletion=o.complete_template)],
    json: o.Json = False,
) -> int:
    """Remove a template that was built or imported, and its images."""
    show.quiet_logs()
    from capsule.cli import templates

    return templates.remove_image(name, as_json=json)

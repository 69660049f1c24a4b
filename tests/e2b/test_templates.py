"""Templates through E2B's own SDK: built from steps by a real Engine, tagged, started from."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from e2b import E2B, AsyncTemplate, Sandbox, Template
from e2b.exceptions import BuildException, SandboxException, TemplateException

from tests.e2b.conftest import parameters
from tests.e2b.programs import run_node_tests, settings
from tests.support.engine import EngineApi
from tests.support.images import Images
from tests.support.servers import RealServer, real_server

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(120)]

MARK = f"e{secrets.token_hex(3)}"  # of the names of this run


class Site:
    """A server that has an Engine to build with, and the SDK bound to it."""

    def __init__(self, server: RealServer, image: str) -> None:
        self.server = server
        self.image = image
        self.options = cast(Any, parameters(server))
        self.sdk: E2B = E2B(**self.options)

    def name(self) -> str:
        return f"{MARK}-{secrets.token_hex(3)}"

    def create(self, template: str) -> Sandbox:
        return self.sdk.Sandbox.create(template, timeout=120)


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, engine: EngineApi, images: Images) -> Iterator[Site]:
    settings = {"DOCKER_HOST": engine.url, "DOCKER_PULL": "never", "DOCKER_IMAGE": images.python}
    with real_server(PROVIDER=getattr(request, "param", "docker"), **settings) as running:
        yield Site(running, images.python)
    for image in engine.get("/images/json"):
        for tag in image["RepoTags"] or ():
            if tag.startswith(f"capsule/{MARK}"):
                engine.call("DELETE", f"/images/{tag}", force=1)


@pytest.mark.parametrize("site", ["local", "docker"], indirect=True)
def test_a_template_is_built_and_started_from(site: Site, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.py").write_text("print('from the image')")
    (tmp_path / "note.txt").write_text("a note")
    name, said = site.name(), []
    template = (
        Template(file_context_path=tmp_path)
        .from_image(site.image)
        .set_envs({"GREETING": 'he said "$HOME" \\ ok'})
        .run_cmd("echo built > built.txt && id -un > who.txt && pwd > where.txt")
        .run_cmd("id -un > /opt/root.txt", user="root")
        .copy("app", "app")
        .copy("note.txt", "/opt/note.txt", mode=0o755)
        .copy("note.txt", "secret.txt", mode=0o600)
        .set_workdir("/srv/work")
        .run_cmd("printf 'two\\nlines' > $PWD/lines")
        .set_start_cmd("sleep 0.3; echo up > /tmp/up; sleep 600", "test -e /tmp/up")
    )
    built = Template.build(
        template,
        name,
        cpu_count=1,
        memory_mb=256,
        on_build_logs=lambda entry: said.append(entry.message),
        **site.options,
    )
    assert built.template_id == name and built.tags == ["default"]
    assert any("COPY" in line for line in said)
    assert Template.exists(name, **site.options)
    with site.create(name) as sandbox:
        assert sandbox.files.read("/tmp/up") == "up\n"
        assert any("sleep 600" in " ".join(each.args) for each in sandbox.commands.list())
        assert sandbox.files.read("built.txt") == "built\n"
        assert sandbox.files.read("who.txt") == "user\n"
        assert sandbox.files.read("where.txt") == "/home/user\n"
        assert sandbox.files.read("/opt/root.txt") == "root\n"
        assert sandbox.files.read("/srv/work/lines") == "two\nlines"
        assert sandbox.commands.run("python3 app/main.py").stdout == "from the image\n"
        assert sandbox.commands.run("stat -c %a /opt/note.txt").stdout == "755\n"
        assert sandbox.commands.run("stat -c '%a %U' secret.txt").stdout == "600 user\n"
        greeting = sandbox.commands.run('printf %s "$GREETING"').stdout
        assert greeting == 'he said "$HOME" \\ ok'
        assert sandbox.commands.run("sudo -n id -u").stdout == "0\n"
        sandbox.files.write("built.txt", "mine")
        info = sandbox.get_info()
        assert (info.memory_mb, info.cpu_count, info.template_id) == (256, 1, name)
    with site.create(name) as again:
        assert again.files.read("built.txt") == "built\n"


def test_tags_stay_with_their_build(site: Site) -> None:
    name, options = f"{MARK}-{uuid.uuid4()}", site.options  # a name may be as long as an id
    first = Template().from_image(site.image).run_cmd("echo one > v")
    second = Template().from_image(site.image).run_cmd("echo two > v")
    one = Template.build(first, f"{name}:v1", tags=["stable"], **options)
    assert one.tags == ["v1", "stable"]
    two = Template.build(second, f"{name}:v2", **options)
    tags = {each.tag: each.build_id for each in Template.get_tags(name, **options)}
    assert tags == {"v1": one.build_id, "stable": one.build_id, "v2": two.build_id}
    for tag, content in (("v1", "one\n"), ("stable", "one\n"), ("v2", "two\n")):
        with site.create(f"{name}:{tag}") as sandbox:
            assert sandbox.files.read("v") == content
            assert sandbox.get_info().template_id == f"{name}:{tag}"
    moved = Template.assign_tags(f"{name}:v2", ["stable", "default"], **options)
    assert (moved.build_id, moved.tags) == (two.build_id, ["stable", "default"])
    with site.create(name) as sandbox:
        assert sandbox.files.read("v") == "two\n"
    Template.remove_tags(name, ["v1"], **options)
    with pytest.raises(SandboxException, match="does not exist"):
        site.create(f"{name}:v1")
    third = Template().from_template(f"{name}:v2").run_cmd("echo three >> v")
    Template.build(third, f"{name}:v3", **options)
    with site.create(f"{name}:v3") as sandbox:
        assert sandbox.files.read("v") == "two\nthree\n"


def test_a_step_that_fails_is_named(site: Site) -> None:
    template = (
        Template().from_image(site.image).run_cmd("true").run_cmd("echo why it failed; exit 3")
    )
    info = Template.build_in_background(template, site.name(), **site.options)
    with pytest.raises(BuildException, match="ended with 3"):
        Template.build(template, site.name(), **site.options)
    status = Template.get_build_status(info, **site.options)
    while status.status.value in ("building", "waiting"):
        status = Template.get_build_status(info, **site.options)
    assert status.status.value == "error"
    assert status.reason is not None and status.reason.step == "2"
    assert "why it failed" in status.reason.message
    with pytest.raises(BuildException, match="not there"):
        Template.build(Template().from_image("nosuch/image"), site.name(), **site.options)


def test_templates_of_the_sdk_for_node(site: Site, node: Path) -> None:
    env = {**settings(site.server), "NAME": site.name(), "IMAGE": site.image}
    run_node_tests(node, "template", env)


async def test_templates_of_the_asynchronous_sdk(site: Site) -> None:
    name = site.name()
    template = AsyncTemplate().from_image(site.image).run_cmd("echo async > v")
    built = await AsyncTemplate.build(template, name, **site.options)
    assert built.name == name
    assert await AsyncTemplate.exists(name, **site.options)
    tags = await AsyncTemplate.get_tags(name, **site.options)
    assert [(each.tag, each.build_id) for each in tags] == [("default", built.build_id)]
    async with httpx.AsyncClient(base_url=site.server.url) as http:
        for path in ("/templates", "/v2/templates"):
            listed = (await http.get(path)).json()
            assert name in [each["templateID"] for each in listed]
        assert (await http.delete(f"/templates/{name}")).status_code == 204
    assert not await AsyncTemplate.exists(name, **site.options)
    for call in (
        AsyncTemplate.get_tags(name, **site.options),
        AsyncTemplate.assign_tags(f"{name}:v1", ["v2"], **site.options),
        AsyncTemplate.remove_tags(name, ["v1"], **site.options),
    ):
        with pytest.raises(TemplateException, match="404"):
            await call

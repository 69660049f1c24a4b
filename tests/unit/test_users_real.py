"""Users in real sandboxes: the template's own, and root, through the service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from capsule.errors import InvalidError
from capsule.model import Isolation
from capsule.service import ContextCall, ContextRun, CreateRequest, ExecCall, RunCall, Service
from tests.unit.test_service_real import folder, serving

__all__ = ["folder"]

pytestmark = pytest.mark.real


class Sandbox:
    def __init__(self, service: Service, id: str) -> None:
        self.service = service
        self.id = id

    @property
    def confined(self) -> bool:
        """Whether execs have namespaces of their own."""
        return "local" in self.service.capabilities()

    async def sh(self, script: str, **options: object) -> str:
        call = ExecCall(cmd=("bash", "-lc", script), **options)  # type: ignore[arg-type]
        done = await self.service.exec(self.id, call)
        assert done.exit.exit_code == 0, done
        return done.stdout.decode()


@pytest_asyncio.fixture
async def base(folder: Path) -> AsyncIterator[Sandbox]:
    async with serving(folder) as service:
        made = await service.create(CreateRequest(template="base"))
        yield Sandbox(service, made.id)


WHO = 'whoami; echo ~ "$HOME" "$USER" "$LOGNAME"; pwd'


async def test_programs_are_the_user_that_the_template_names(base: Sandbox) -> None:
    assert (await base.sh(WHO)).splitlines() == [
        "user",
        "/home/user /home/user user user",
        "/home/user",
    ]
    path = (await base.sh("echo $PATH; command -v python3")).split()
    assert "/usr/bin" in path[0].split(":") and path[1].endswith("python3")


async def test_the_home_and_the_workspace_are_one_folder(base: Sandbox) -> None:
    await base.sh("echo mine > note; mkdir sub")
    files = base.service.files(base.id)
    assert (await files.read_bytes("/workspace/note", limit=100)).data == b"mine\n"
    await files.write("sub/other", b"x")
    assert await base.sh("cat sub/other; cd /workspace/sub; cat other") == "xx"
    assert (await base.sh("pwd", cwd="/home/user/sub")).strip() == "/home/user/sub"


async def test_everything_starts_at_home(base: Sandbox) -> None:
    code = "import os; print(os.getcwd())"
    ran = await base.service.run(base.id, RunCall(code, "python"))
    assert ran.stdout == b"/home/user\n"
    context = await base.service.contexts.create(base.id, ContextCall("python"))
    assert context.cwd == "/home/user"
    result = await base.service.contexts.run(base.id, ContextRun(code, context.id))
    assert result.stdout == b"/home/user\n"


async def test_no_further_user_namespace_is_allowed_but_roots_own(base: Sandbox) -> None:
    """Behind seccomp: once root's stands, the kernel's count for the box is zero again."""
    if base.service.get(base.id).isolation is not Isolation.NAMESPACES:
        pytest.skip("the count is a user namespace's, and there is none")
    allowed = "cat /proc/sys/user/max_user_namespaces"
    assert await base.sh(allowed) == "0\n"
    assert await base.sh("id -u", user="root") == "0\n"
    assert await base.sh(allowed) == "0\n", "after an exec as root"


async def test_a_context_can_be_roots(base: Sandbox) -> None:
    code = "import os; print(os.getuid(), os.getcwd(), os.environ['HOME'])"
    context = await base.service.contexts.create(base.id, ContextCall("python", user="root"))
    result = await base.service.contexts.run(base.id, ContextRun(code, context.id))
    assert result.stdout == b"0 /root /root\n"
    with pytest.raises(InvalidError, match="daemon"):
        await base.service.contexts.create(base.id, ContextCall("python", user="daemon"))


async def test_a_snapshot_has_both_homes(base: Sandbox) -> None:
    service = base.service
    await base.sh("echo one > in-home")
    await base.sh("echo two > in-roots", user="root")
    await service.snapshots.make(base.id, "homes", {})
    again = await service.create(CreateRequest(snapshot="homes"))
    twin = Sandbox(service, again.id)
    assert await twin.sh("cat ~/in-home /workspace/in-home; ls ~") == "one\none\nin-home\n"
    assert await twin.sh("cat ~/in-roots", user="root") == "two\n"

"""What the Docker provider promises beyond the contract."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from capsule.errors import ForbiddenError, NotSupportedError
from capsule.model import MIB, Isolation, Limits, Reason, SandboxId, SandboxSpec, Template, User
from capsule.providers.contract import Adjustable, Measured, Pausable
from capsule.providers.docker import box as boxes
from capsule.providers.docker.plan import AGENT_TASKS
from capsule.providers.docker.provider import DockerProvider
from capsule.providers.docker.settings import DockerSettings
from capsule.testing.harness import Subject, opened, owned, until
from capsule.testing.users import AT_HOME
from tests.support.engine import PATIENCE
from tests.support.images import Images

pytestmark = pytest.mark.real


@pytest.fixture
def settings(docker_url: str, run_dir: Path, agent_binary: Path) -> DockerSettings:
    return DockerSettings(
        run_dir, run_dir, agent_binary, host=docker_url, patience=PATIENCE, pull="never"
    )


@pytest.fixture
async def provider(settings: DockerSettings) -> AsyncIterator[DockerProvider]:
    made = DockerProvider(settings)
    async with opened(made):
        yield made


async def launched(
    provider: DockerProvider, image: str, *, id: str = "a", runtime: str = ""
) -> Subject:
    limits = Limits(disk=16 * MIB, cpus=1.0)
    spec = SandboxSpec(Template("test", image=image), limits, runtime=runtime)
    return Subject(await provider.launch(SandboxId(id), spec))


async def test_an_image_like_alpine_has_all_that_is_needed(
    provider: DockerProvider, images: Images
) -> None:
    subject = await launched(provider, images.alpine)
    assert await subject.output("id -u; pwd; echo x > file; cat file") == "1000\n/workspace\nx"
    assert subject.box.about == {
        "runtime": "runc", "transport": "socket", "image": images.alpine,
    }  # fmt: skip


@pytest.mark.parametrize("way", ["socket", "engine"])
async def test_an_empty_image_runs_what_is_brought_in(
    settings: DockerSettings, images: Images, agent_binary: Path, way: str
) -> None:
    async with opened(DockerProvider(replace(settings, transport=way))) as provider:
        assert isinstance(provider, DockerProvider)
        subject = await launched(provider, images.empty)
        await subject.link.write("program", agent_binary.read_bytes(), mode=0o755)
        result = await subject.run("/workspace/program", "version")
        assert result.stdout == b"capsule-agent protocol 1\n"
        assert set(await subject.entries("/")) >= {"workspace", "tmp", "proc"}
        assert subject.box.about["transport"] == way


async def test_other_limits_hold_from_then_on(provider: DockerProvider, images: Images) -> None:
    subject = await launched(provider, images.python)
    assert isinstance(subject.box, Adjustable)
    was = Limits(disk=16 * MIB, cpus=1.0)
    wanted = replace(was, memory=80 * MIB, processes=20, cpus=0.5)
    if subject.box.adjusts(wanted):
        await subject.box.adjust(wanted)
        eat = "b = bytearray({} << 20); print(len(b) >> 20)"
        assert (await subject.run("python3", "-c", eat.format(40))).stdout == b"40\n"
        eaten = await subject.run("python3", "-c", eat.format(120))
        assert eaten.exit.reason is Reason.OOM_KILLED
        count = await subject.output("cat /sys/fs/cgroup/pids.max /sys/fs/cgroup/pids/pids.max; :")
        assert str(20 + AGENT_TASKS) in count.split()
    else:
        assert any(each.what == "disk" for each in subject.box.unenforced)
    assert not subject.box.adjusts(replace(was, open_files=77))
    assert not subject.box.adjusts(replace(was, disk=32 * MIB))


async def test_what_is_paused_stands_still_and_goes_on(
    provider: DockerProvider, images: Images
) -> None:
    subject = await launched(provider, images.python)
    assert isinstance(subject.box, Pausable)
    loop = "i=0; while true; do i=$((i + 1)); echo $i > count; sleep 0.01; done"
    async with await subject.start_sh(loop, timeout=60):
        await until(lambda: counted(subject), what="it counts")
        await subject.box.pause()
        assert await provider.adopt(subject.box.handle) is not None
        await subject.box.resume()
        before = await counted(subject)

        async def goes_on() -> bool:
            return await counted(subject) > before

        await until(goes_on, what="it counts on")
    await subject.box.pause()
    await subject.box.destroy()
    assert await owned(provider) == []


async def counted(subject: Subject) -> int:
    return int(await subject.content("count") or 0) if await subject.exists("count") else 0


async def test_two_servers_on_one_engine_do_not_see_each_other(
    settings: DockerSettings, provider: DockerProvider, images: Images, tmp_path: Path
) -> None:
    subject = await launched(provider, images.alpine)
    short = Path(f"/tmp/{tmp_path.parent.name[-4:]}-{id(provider):x}")
    short.mkdir()
    try:
        async with opened(DockerProvider(replace(settings, run_dir=short))) as other:
            assert await owned(other) == []
            assert await other.adopt(subject.box.handle) is None
            await other.discard(subject.box.handle)
        assert await subject.output("echo alive") == "alive"
    finally:
        for path in sorted(short.rglob("*"), reverse=True):
            path.rmdir()
        short.rmdir()


async def test_the_disk_is_no_mount_of_the_host_once_the_box_runs(
    provider: DockerProvider, images: Images, run_dir: Path
) -> None:
    subject = await launched(provider, images.alpine)
    if any(gap.what == "memory" for gap in subject.box.unenforced):
        pytest.skip("disks are in memory here")
    mounted = await asyncio.to_thread(Path("/proc/self/mountinfo").read_text)
    assert str(run_dir) not in mounted
    assert "/dev/loop" in await subject.output("df /workspace")


async def test_without_images_for_disks_they_are_in_memory_and_say_so(
    settings: DockerSettings, images: Images
) -> None:
    async with opened(DockerProvider(replace(settings, disk_backing="memory"))) as provider:
        assert isinstance(provider, DockerProvider)
        subject = await launched(provider, images.alpine)
        assert [gap.what for gap in subject.box.unenforced] == ["memory"]
        assert "tmpfs" in await subject.output("df /workspace")


async def test_a_runtime_that_is_not_there_is_refused_before_anything_starts(
    provider: DockerProvider, images: Images
) -> None:
    with pytest.raises(NotSupportedError, match="no runtime 'nosuch'"):
        await launched(provider, images.alpine, runtime="nosuch")
    assert await owned(provider) == []


async def test_a_runtime_below_the_least_isolation_is_refused(
    settings: DockerSettings, images: Images
) -> None:
    strict = replace(settings, min_isolation=Isolation.NAMESPACES)
    async with opened(DockerProvider(strict)) as provider:
        assert isinstance(provider, DockerProvider)
        with pytest.raises(ForbiddenError, match="required: namespaces"):
            await launched(provider, images.alpine, runtime="runc")
        assert await owned(provider) == []


async def test_gvisor_is_chosen_per_box_and_measured_from_outside(
    provider: DockerProvider, images: Images, runsc: str
) -> None:
    subject = await launched(provider, images.python, runtime=runsc)
    assert subject.box.isolation is Isolation.GVISOR
    assert isinstance(subject.box, Measured)
    before = await subject.box.measure(await subject.link.usage())
    code = "import time\nx = b'x' * 50_000_000\nprint('ready')\ntime.sleep(1000)"
    async with await subject.start_python(code) as stream:
        await anext(stream)
        after = await subject.box.measure(await subject.link.usage())
    assert after.source == "engine"
    assert before.cpu_ms is not None and after.cpu_ms is not None
    assert after.cpu_ms > before.cpu_ms
    assert before.memory_bytes is not None and after.memory_bytes is not None
    assert after.memory_bytes > before.memory_bytes + 40_000_000


async def test_a_share_of_cpu_holds_under_gvisor_as_the_host_counts_it(
    provider: DockerProvider, images: Images, runsc: str
) -> None:
    limits = Limits(disk=16 * MIB, cpus=0.25)
    spec = SandboxSpec(Template("test", image=images.alpine), limits, runtime=runsc)
    subject = Subject(await provider.launch(SandboxId("a"), spec))
    assert isinstance(subject.box, Measured)
    async with await subject.start_sh("while :; do :; done", timeout=30):
        before, began = await subject.box.measure(await subject.link.usage()), time.monotonic()
        await asyncio.sleep(2.0)  # what it measures is a span of time
        after, lasted = await subject.box.measure(await subject.link.usage()), time.monotonic()
    assert before.cpu_ms is not None and after.cpu_ms is not None
    assert after.cpu_ms - before.cpu_ms < (lasted - began) * 1000 * 0.4


async def test_a_gvisor_without_sockets_is_reached_through_the_engine(
    provider: DockerProvider, images: Images, runsc_nouds: str
) -> None:
    subject = await launched(provider, images.alpine, runtime=runsc_nouds)
    assert subject.box.about["transport"] == "engine"
    assert await subject.output("echo alive") == "alive"


@pytest.mark.timeout(60)
async def test_sockets_that_do_not_come_out_are_noticed_and_remembered(
    provider: DockerProvider, images: Images, runsc_nouds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boxes, "READY_WITHIN", 3.0)
    host = provider._ready()
    lying = replace(host.facts.runtimes[runsc_nouds], arguments=("--host-uds=all",))
    host.facts = replace(host.facts, runtimes={**host.facts.runtimes, runsc_nouds: lying})
    for id in ("a", "b"):
        subject = await launched(provider, images.alpine, id=id, runtime=runsc_nouds)
        assert subject.box.about["transport"] == "engine"
    assert host.silent == {runsc_nouds}


@pytest.mark.parametrize("backing", ["auto", "memory"])
async def test_a_template_names_its_user_and_home(
    settings: DockerSettings, images: Images, backing: str
) -> None:
    async with opened(DockerProvider(replace(settings, disk_backing=backing))) as provider:
        template = Template("test", image=images.alpine, user=User("user", "/home/user"))
        spec = SandboxSpec(template, Limits(disk=16 * MIB, cpus=1.0))
        subject = Subject(await provider.launch(SandboxId("a"), spec))
        said = await subject.output("pwd; echo x > file; cat ~/file", env={"HOME": "/home/user"})
        assert said == "/home/user\nx"
        assert await subject.output("id -u; cd; echo y > own; cat own", **AT_HOME) == "0\ny"
        apart = any(gap.what == "memory" for gap in subject.box.unenforced)
        shared = await subject.link.list("/workspace")
        assert [entry.name for entry in shared.entries] == ([] if apart else ["file"])

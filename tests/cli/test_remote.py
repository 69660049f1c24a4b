"""Commands for a server: create, ls, exec, cp, reset, rm, pool; and serve."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from capsule_sdk import Capsule
from tests.cli.conftest import Cli
from tests.cli.terminal import at_terminal
from tests.support import free_port, wait_for
from tests.support.servers import CAPSULE, real_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


def test_pause_and_resume(remote: Cli) -> None:
    id = remote("create", "bash", "--on-timeout", "pause").out.strip()
    assert remote("pause", id).out == f"{id}\n"
    assert "paused" in remote("ls").out
    refused = remote("exec", id, "true")
    assert refused.code != 0 and "is paused" in refused.err
    assert json.loads(remote("resume", id, "--json").out)["sandboxes"][0]["state"] == "running"
    assert remote("exec", id, "true").code == 0
    remote("rm", id)


def test_reset_and_pool(remote: Cli) -> None:
    id = remote("create", "bash").out.strip()
    remote("exec", id, "touch", "a")
    assert remote("reset", id).out == f"{id}\n"
    assert remote("exec", id, "ls").out == ""
    assert json.loads(remote("reset", id, "--json").out)["started"] == "cold"
    remote("rm", id)
    assert remote("reset", id).code == 1
    assert remote("pool").code == 0
    assert json.loads(remote("pool", "--json").out)["shelves"] == []


def test_snapshots_and_forks(remote: Cli, tmp_path: Path) -> None:
    id = remote("create", "bash").out.strip()
    remote("exec", id, "sh", "-c", "echo base > f")
    assert remote("snapshot", "create", id, "cli-base").out == "cli-base\n"
    assert "cli-base" in remote("snapshot", "ls").out
    other = remote("create", "--snapshot", "cli-base").out.strip()
    forks = remote("fork", id, "--count", "2").out.split()
    for each in (other, *forks):
        assert remote("exec", each, "cat", "f").out == "base\n"
    archive = str(tmp_path / "base.tar")
    assert remote("snapshot", "export", "cli-base", archive).out == f"{archive}\n"
    assert remote("snapshot", "import", "cli-base", archive).code == 1
    assert remote("snapshot", "import", "cli-moved", archive).out == "cli-moved\n"
    assert remote("snapshot", "rm", "cli-base", "cli-moved").out == "cli-base\ncli-moved\n"
    assert json.loads(remote("snapshot", "ls", "--json").out) == {"snapshots": []}
    remote("rm", id, other, *forks)


@pytest.mark.needs("root", "e2fsprogs")
def test_steps_and_volumes(remote: Cli) -> None:
    made = remote("volume", "create", "cli-data", "--size", "20MiB")
    assert made.out == "cli-data\n"
    (row,) = [row.split() for row in remote("volume", "ls").out.splitlines() if "cli-data" in row]
    assert row[2:4] == ["20", "MiB"]
    made = remote("create", "bash", "--checkpoint", "--volume", "cli-data:/workspace/data")
    id = made.out.strip()
    remote("exec", id, "sh", "-c", "echo 1 > f; echo kept > data/f")
    remote("exec", id, "rm", "f")
    assert len(remote("steps", id).out.splitlines()) == 4
    assert remote("diff", id, "1", "2").out == "D /workspace/f\n"
    assert remote("undo", id, "1").out == f"{id}\n"
    assert remote("exec", id, "cat", "f", "data/f").out == "1\nkept\n"
    assert "in use" in remote("volume", "rm", "cli-data").err
    remote("rm", id)
    assert remote("volume", "rm", "cli-data").out == "cli-data\n"
    assert json.loads(remote("volume", "ls", "--json").out) == {"volumes": []}


def test_create_ls_and_rm(remote: Cli) -> None:
    plain = remote("create", "bash", "--ttl", "5m", "--memory", "64MiB", "--metadata", "team=blue")
    id = plain.out.strip()
    listed = remote("ls").out.splitlines()
    assert listed[0].split()[:4] == ["ID", "TEMPLATE", "STATE", "AGE"]
    (row,) = [line.split() for line in listed if line.startswith(id)]
    assert row[1:3] == ["bash", "running"]
    assert id in remote("ls", "-q").out.split()
    assert remote("rm", id).out == f"{id}\n"
    assert remote("rm", id).code == 1
    made = json.loads(remote("create", "python", "--cpus", "0.25", "--json").out)
    assert (made["template"], made["limits"]["cpus"]) == ("python", 0.25)
    found = json.loads(remote("ls", "--json").out)["sandboxes"]
    assert made["id"] in [each["id"] for each in found]
    removed = json.loads(remote("rm", made["id"], "--json").out)
    assert removed == {"deleted": [made["id"]], "failed": []}


def test_exec_passes_everything_on(remote: Cli, capsule: Capsule) -> None:
    done = remote("exec", capsule.id, "sh", "-c", "cat; echo err >&2; exit 4", input="typed\n")
    assert (done.code, done.out, done.err) == (4, "typed\n", "err\n")
    assert remote("exec", capsule.id, "--", "echo", "-n", "--json").out == "--json"


def test_exec_options_come_before_the_id(remote: Cli, capsule: Capsule) -> None:
    done = remote("exec", "--env", "A=1", "--cwd", "/tmp", capsule.id, "sh", "-c", "echo $A $PWD")
    assert done.out == "1 /tmp\n"
    session = ("exec", "--session", "s", capsule.id, "bash", "-c")
    remote(*session, "export B=2; cd /tmp")
    assert remote(*session, "echo $B $PWD").out == "2 /tmp\n"


def test_exec_ends_with_the_reason(remote: Cli, capsule: Capsule) -> None:
    late = remote("exec", "--timeout", "0.5", capsule.id, "sleep", "60")
    assert (late.code, late.err.splitlines()[0]) == (124, "error: timed out after 0.5 s")
    missing = remote("exec", capsule.id, "nosuchprogram")
    assert missing.code == 125
    assert "nosuchprogram" in missing.err
    assert remote("exec", "nosuchsandbox", "true").code == 125


def test_exec_as_json_does_not_wait_for_input_that_never_comes(
    remote: Cli, capsule: Capsule
) -> None:
    with remote.popen("exec", "--json", capsule.id, "echo", "hi", stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["stdout"] == "hi\n"
        assert process.wait(30) == 0
        assert process.stdin is not None  # open all the time
    done = remote("exec", "--json", capsule.id, "cat", input="typed")
    assert json.loads(done.out)["stdout"] == "typed"
    body = json.loads(remote("exec", "--json", capsule.id, "sh", "-c", "echo hi; exit 2").out)
    assert (body["stdout"], body["exit_code"], body["reason"]) == ("hi\n", 2, "exited")


def test_a_reader_that_leaves_ends_the_program(remote: Cli, capsule: Capsule) -> None:
    with remote.popen("exec", capsule.id, "yes") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "y\n"
        assert [each.cmd for each in capsule.execs() if each.running] == [("yes",)]
        process.stdout.close()
        assert process.wait(30) == 141
    wait_for(lambda: not any(e.running for e in capsule.execs()), what="the program ended")


def test_exec_on_a_terminal(remote: Cli, capsule: Capsule) -> None:
    command = [*CAPSULE, "exec", "-it", capsule.id, "bash", "--norc"]
    with at_terminal(command, remote.env, remote.cwd, rows=30, cols=90) as screen:
        screen.type("stty size\n")
        screen.wait_for("30 90")
        screen.resize(20, 70)
        screen.type("while [ \"$(stty size)\" != '20 70' ]; do :; done; echo re${x}sized\n")
        screen.wait_for("resized")
        screen.type("exit 6\n")
        assert screen.finish() == 6
        assert screen.cooked()


def test_files_are_copied_both_ways(remote: Cli, capsule: Capsule) -> None:
    (remote.cwd / "one.txt").write_text("1")
    assert remote("cp", "one.txt", f"{capsule.id}:/workspace/two.txt").code == 0
    assert remote("cp", "one.txt", f"{capsule.id}:/workspace").code == 0
    assert remote("cp", "one.txt", f"{capsule.id}:new/").code == 0
    assert capsule.exec("cat two.txt one.txt new/one.txt").stdout == "111"
    assert remote("cp", f"{capsule.id}:two.txt", "back.txt").code == 0
    assert (remote.cwd / "back.txt").read_text() == "1"
    assert remote("cp", f"{capsule.id}:/workspace/two.txt", ".").code == 0
    assert (remote.cwd / "two.txt").read_text() == "1"
    assert remote("cp", "-", f"{capsule.id}:/workspace/in", input="piped").code == 0
    assert remote("cp", f"{capsule.id}:/workspace/in", "-").out == "piped"


def test_folders_are_copied_both_ways(remote: Cli, capsule: Capsule) -> None:
    source = remote.cwd / "project"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "data").write_bytes(os.urandom(100_000))
    (source / "link").symlink_to("deep/data")
    moved = json.loads(remote("cp", "project", f"{capsule.id}:", "--json").out)
    assert (moved["files"], moved["bytes"]) == (1, 100_000)
    assert remote("cp", f"{capsule.id}:project", "copy").code == 0
    assert (remote.cwd / "copy/deep/data").read_bytes() == (source / "deep/data").read_bytes()
    assert (remote.cwd / "copy/link").readlink() == Path("deep/data")


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("a", "b", "one of the two must be in a sandbox"),
        ("ID:/a", "ID:/b", "one of the two must be in a sandbox"),
        ("missing", "ID:/b", "no such file: missing"),
        ("ID:/nothing", "b", "/nothing"),
        ("ID:/etc/hostname", "no/such/folder/x", "no such folder: no/such/folder"),
    ],
)
def test_a_copy_that_cannot_be_says_why(
    remote: Cli, capsule: Capsule, source: str, target: str, message: str
) -> None:
    done = remote("cp", source.replace("ID", capsule.id), target.replace("ID", capsule.id))
    assert done.code == 1
    assert message in done.err


def test_rm_tries_all_and_reports_each_failure(remote: Cli) -> None:
    ids = [remote("create").out.strip() for _ in range(2)]
    done = remote("rm", ids[0], "nosuch1", "nosuch2", ids[1])
    assert (done.code, done.out.split()) == (1, ids)
    assert done.err.count("error:") == 2
    failed = json.loads(remote("rm", "--json", "nosuch").out)
    assert (failed["deleted"], failed["failed"][0]["id"]) == ([], "nosuch")
    assert failed["failed"][0]["code"] == "not_found"


def test_rm_all_is_an_option(remote: Cli) -> None:
    assert remote("rm").code == 2
    with real_server() as server:
        own = Cli({**remote.env, "CAPSULE_URL": server.url}, remote.cwd)
        ids = sorted(own("create").out.strip() for _ in range(2))
        assert sorted(own("rm", "--all").out.split()) == ids
        done = own("ls")
        assert (done.code, done.out) == (0, "")


def test_keys_are_sent_and_missed(remote: Cli) -> None:
    key = "k" * 32
    with real_server(API_KEYS=key) as server:
        own = Cli({**remote.env, "CAPSULE_URL": server.url}, remote.cwd)
        wanted = "hint: set CAPSULE_API_KEY to one of the server's keys, or use --api-key\n"
        for refused in (own("ls"), own("rm", "x"), own("create"), own("cp", "id:y", ".")):
            assert (refused.code, refused.err) == (1, f"error: no API key\n{wanted}")
        assert own("exec", "x", "true").code == 125
        wrong = own("ls", "--json", CAPSULE_API_KEY="wrong")
        assert (wrong.code, wrong.err) == (1, f"error: unknown API key\n{wanted}")
        assert "CAPSULE_API_KEY" in json.loads(wrong.out)["error"]["hint"]
        assert own("ls", CAPSULE_API_KEY="line\nbreak").code == 1
        assert own("ls", "--api-key", key).code == 0
        assert own("ls", CAPSULE_API_KEY=key).code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cpus", "nan"], "--cpus nan is not a number"),
        (["--ttl", "100d"], "--ttl 8640000.0 is out of range, allowed: 1 to 86400 seconds"),
        (["--idle-timeout", "400d"], "--idle-timeout 34560000.0 is out of range"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(remote: Cli, args: list[str], message: str) -> None:
    done = remote("create", *args)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {message}")
    body = json.loads(remote("create", "--json", *args).out)
    assert body["error"]["code"] == "invalid"
    assert body["error"]["details"]["field"]


def test_a_server_that_is_not_there(remote: Cli) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = remote("ls", "--url", url)
    assert done.code == 1
    assert done.err == (
        f"error: cannot reach the Capsule server at {url}\n"
        "hint: start it with `capsule serve`, or set CAPSULE_URL to where it runs\n"
    )
    body = json.loads(remote("ls", "--url", url, "--json").out)
    assert body["error"]["code"] == "unavailable"


def test_serve_prints_its_address_and_stops(cli: Cli) -> None:
    port = free_port()
    env = {**cli.env, "CAPSULE_RUN_DIR": f"{cli.env['CAPSULE_RUN_DIR']}-s"}
    own = Cli({**env, "CAPSULE_DATA_DIR": f"{cli.env['CAPSULE_DATA_DIR']}-s"}, cli.cwd)
    with own.popen("serve", "--port", str(port), stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        said = ""
        while "-X DELETE" not in said:
            said += process.stdout.readline()
        assert f"http://localhost:{port}" in said
        assert "isolation: " in said
        assert own("ls", "--url", f"http://localhost:{port}").code == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--host", "0.0.0.0"], "without API keys"),
        (["--port", "notaport"], "--port"),
        (["--drain", "never"], "drain"),
        (["--config", "missing.yaml"], "missing.yaml"),
    ],
)
def test_serve_refuses_what_makes_no_sense(cli: Cli, args: list[str], message: str) -> None:
    done = cli("serve", *args)
    assert done.code in (1, 2)
    assert message in done.err
    assert len(done.err.splitlines()) <= 2

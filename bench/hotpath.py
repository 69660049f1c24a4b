"""`python -m bench.hotpath`: where the time of create, exec and delete goes.

Three looks at the same work: CPU time per operation, of the server and of the client; the server's
Python by function (the service in this process, under cProfile); and what the agents do in the
kernel, by system call (perf, where it is installed and allowed).
"""

from __future__ import annotations

import asyncio
import cProfile
import io
import os
import pstats
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench import report
from bench.capsule import TEMPLATE, Inside
from bench.server import serving
from capsule.service import CreateRequest, ExecCall
from capsule_sdk import CapsuleClient

COUNT = 100
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


def main() -> None:
    load = os.getloadavg()[0]
    with serving(64) as server, CapsuleClient(server.url) as client:
        life(client)
        print("CPU per operation\n")
        print(shares(client, server.pid))
        print("\nthe agents in the kernel, by system call\n")
        print(system_calls(client))
    print("\nthe service in Python: create, exec, delete, by function\n")
    print(functions())
    print(report.conditions(load))


def life(client: CapsuleClient) -> None:
    sandbox = client.create(TEMPLATE)
    sandbox.exec(["true"]).check()
    sandbox.delete()


def shares(client: CapsuleClient, pid: int) -> str:
    rows = [("", "server, user ms", "server, kernel ms", "client ms", "until the answer ms")]
    with client.create("python") as sandbox, sandbox.context() as context:
        work: dict[str, Callable[[], object]] = {
            "create + delete": lambda: client.create(TEMPLATE).delete(),
            "exec": lambda: sandbox.exec(["true"]).check(),
            "run in a context": lambda: context.run("1 + 1"),
            "get": sandbox.refresh,
        }
        for name, call in work.items():
            user, kernel = cpu_ms(pid)
            own, begun = time.process_time(), time.perf_counter()
            for _ in range(COUNT):
                call()
            spent = [
                after - before for after, before in zip(cpu_ms(pid), (user, kernel), strict=True)
            ]
            spent.append((time.process_time() - own) * 1e3)
            spent.append((time.perf_counter() - begun) * 1e3)
            rows.append((name, *(f"{value / COUNT:.2f}" for value in spent)))  # type: ignore[arg-type]
    return report.aligned(rows, right=range(1, 5))


def cpu_ms(pid: int) -> tuple[float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) * TICK_MS, int(fields[12]) * TICK_MS


def functions() -> str:
    """Time spent in each function itself; waiting is the loop's `run`."""
    profile, inside = cProfile.Profile(), Inside()
    try:
        inside._runner.run(lives(inside, 5))
        profile.enable()
        inside._runner.run(lives(inside, COUNT))
        profile.disable()
    finally:
        inside.close()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(18)
    return text.getvalue().strip()


async def lives(inside: Inside, count: int) -> None:
    for _ in range(count):
        sandbox = await inside._service.create(CreateRequest(template=TEMPLATE))
        await inside._service.exec(sandbox.id, ExecCall(cmd=("true",)))
        await inside._service.delete(sandbox.id)
        await asyncio.sleep(0)


def system_calls(client: CapsuleClient) -> str:
    if shutil.which("perf") is None:
        return "perf is not installed"
    with tempfile.TemporaryDirectory(prefix="capsule-bench-") as folder:
        data = str(Path(folder, "perf.data"))
        command = ["perf", "record", "-a", "-g", "-q", "-F", "1999", "-o", data]
        recorder = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(0.5)  # it says nowhere that it has begun
        for _ in range(COUNT):
            life(client)
        recorder.send_signal(signal.SIGINT)
        recorder.wait()
        return told(data)


def told(data: str) -> str:
    report_ = ["perf", "report", "-i", data, "--children", "--comm", "capsule-agent", "-g", "none"]
    report_ += ["--percentage", "relative", "--sort", "symbol"]
    lines = subprocess.run(report_, capture_output=True, text=True, check=False).stdout.splitlines()
    calls = ("__x64_sys_", "__do_sys_", "do_exit", "exc_page_fault")
    kept = []
    for line in lines:
        fields = line.split()
        if len(fields) > 3 and fields[3].startswith(calls):
            name = fields[3].removeprefix("__x64_sys_").removeprefix("__do_sys_")
            kept.append(f"{fields[0]:>7}  {name}")
    return "\n".join(kept[:16]) or "perf recorded nothing (kernel.perf_event_paranoid?)"


if __name__ == "__main__":
    main()

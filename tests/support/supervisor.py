"""The Engine that a whole test run shares, and the process that ends it with the run.

The run is its owner: `make test`, a pytest started by hand, or `make bench`. Whoever needs the
Engine first, in whichever worker, starts a supervisor. That waits for the owner's end, however it
comes, and then removes all that there was. A run that needs no Engine starts nothing.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support import IN_CI, ROOT
from tests.support.engine import (
    CACHE,
    FOLDERS,
    Engine,
    EngineApi,
    EngineError,
    EngineMissing,
    abandoned,
    find_runsc,
    sweep,
)
from tests.support.images import Images
from tests.support.layers import locked

OWNER = "CAPSULE_TEST_OWNER"
SOCKET = "/var/run/docker.sock"
NOTES = "images"

# Why there is none, once that is known: then every test that needs one asks in vain, but quickly.
_missing: list[str] = []


@dataclass(frozen=True, slots=True)
class Shared:
    supervisor: int
    url: str

    def images(self, api: EngineApi) -> Images:
        return Images(api, notes=_folder() / NOTES)


def own_the_run() -> bool:
    """For who starts workers, before that. True: this process is the owner, and must release."""
    return os.environ.setdefault(OWNER, str(os.getpid())) == str(os.getpid())


def acquire() -> Shared:
    """The run's Engine, started if this is the first to ask. Raises EngineMissing."""
    if _missing:
        raise EngineMissing(_missing[0])
    own_the_run()
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        with locked(CACHE / "engine.lock"):
            return _state() or _start()
    except EngineMissing as missing:
        _missing.append(str(missing))
        raise


def release() -> None:
    """At the end of the owner: returns when nothing is left of the Engine."""
    found = _state()
    if found is None:
        return
    with suppress(ProcessLookupError):
        os.kill(found.supervisor, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while _folder().exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def left() -> list[str]:
    """Containers that no test has removed; of Capsule's alone, where the Engine is not ours."""
    found = _state()
    if found is None:
        return []
    api = EngineApi(found.url)
    ours = (_folder() / "daemon.json").exists()
    containers = api.containers("" if ours else "capsule.owner")
    api.close()
    return [f"{each['Names']} {each['Status']} {each['Labels']}" for each in containers]


def _folder() -> Path:
    return Path("/tmp", f"{FOLDERS}{os.environ[OWNER]}")


def _state() -> Shared | None:
    try:
        found = Shared(**json.loads((_folder() / "shared.json").read_text()))
        alive = (
            b"tests.support.supervisor" in Path(f"/proc/{found.supervisor}/cmdline").read_bytes()
        )
    except FileNotFoundError:
        return None
    return found if alive else None


def _start() -> Shared:
    # It outlives who starts it, and must not hold the output open that others read to its end.
    log = CACHE / "supervisor.log"
    with log.open("w") as output:
        started = subprocess.run(
            [sys.executable, "-m", "tests.support.supervisor"],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            check=False,
        )
    found = _state()
    if started.returncode != 0 or found is None:
        raise EngineMissing(log.read_text()[-1000:].strip())
    return found


def main() -> None:
    """Returns when the Engine runs; a child stays to supervise it. Ends with 1 and why if not."""
    told, tell = os.pipe()
    if os.fork():
        os.close(tell)
        sys.exit(0 if os.read(told, 1) else 1)
    os.close(told)
    supervise(ready=tell)


def supervise(ready: int) -> None:
    owner = os.pidfd_open(int(os.environ[OWNER]))
    # A signal is only the news that it is over: it ends the wait below, and no more.
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    for folder in abandoned():
        sweep(folder)
    folder = _folder()
    sweep(folder)  # of a process that had the same number
    folder.mkdir(mode=0o700)
    try:
        chosen = choose()
        if isinstance(chosen, Engine):
            chosen.start()
    except EngineMissing as missing:
        sweep(folder)
        sys.exit(str(missing))
    written = folder / "shared.json.new"
    written.write_text(json.dumps(asdict(Shared(os.getpid(), chosen.url))))
    written.rename(folder / "shared.json")
    os.write(ready, b".")
    select.select([owner, told], [], [])
    if isinstance(chosen, Engine):
        chosen.stop()
    else:
        _take_along(chosen, folder / NOTES)
    sweep(folder)


def choose() -> EngineApi | Engine:
    """The Engine that DOCKER_HOST names; a running one that has all that the tests use; our own."""
    if named := os.environ.get("DOCKER_HOST"):
        api = EngineApi(named)
        if api.answers():
            return api
        raise EngineMissing(f"no Engine answers at DOCKER_HOST={named}")
    api = EngineApi(f"unix://{SOCKET}")
    running = api.answers()
    if running and (not IN_CI or find_runsc() is None or "runsc" in api.runtimes()):
        return api
    try:
        return Engine(_folder())
    except EngineMissing as missing:
        if running:
            return api
        raise EngineMissing(f"no Engine answers at {SOCKET}, and {missing}") from None


def _take_along(api: EngineApi, notes: Path) -> None:
    """Out of somebody else's Engine, what was brought into it."""
    if not notes.exists() or not api.answers():
        return
    for tag in notes.read_text().split():
        with suppress(EngineError):
            api.call("DELETE", f"/images/{tag}", force=1)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["release"]:
            release()
        case ["left"]:
            sys.stdout.write("\n".join(left()))
        case _:
            main()

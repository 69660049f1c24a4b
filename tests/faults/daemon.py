"""A dockerd to be killed and started again, with runtimes that fail."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tests.support.engine import Engine, EngineError
from tests.support.images import Images

# A runtime that cannot make a container, and says why as they do: in the file named by --log.
BROKEN = """\
#!/bin/sh
while [ $# -gt 0 ]; do
    [ "$1" = --log ] && echo '{"level": "error", "msg": "the moon is in the wrong quarter"}' > "$2"
    shift
done
exit 1
"""


class Daemon(Engine):
    def start(self, *, live_restore: bool = False) -> None:
        self.folder.mkdir(exist_ok=True)  # of one that did not start nothing is left
        program = self.folder / "broken"
        program.write_text(BROKEN)
        program.chmod(0o755)
        super().start(live_restore=live_restore)

    def _config(self, live_restore: bool) -> dict[str, Any]:
        config = super()._config(live_restore)
        config["runtimes"]["broken"] = {"path": f"{self.folder}/broken"}
        return config

    def restore(self) -> None:
        """As it was in the beginning."""
        if not self.api.answers():
            self.start()
        elif self.api.get("/info")["LiveRestoreEnabled"]:
            self.restart(how="kill")
        assert self.api.containers() == [], "the test before left them"
        for volume in self.api.get("/volumes")["Volumes"] or ():
            with suppress(EngineError):
                self.api.call("DELETE", f"/volumes/{volume['Name']}")
        Images(self.api).name("alpine")

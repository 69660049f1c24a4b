"""A deep agent that works in a sandbox: its shell and its files are Capsule's.

pip install deepagents    # and the package of your model's provider
MODEL=PROVIDER:NAME python examples/deep_agent.py 'Write a snake game, and tests for it'
"""

from __future__ import annotations

import os
import sys

from deepagents import create_deep_agent
from deepagents.backends.protocol import (
    ExecuteResponse,
    FileDownloadResponse,
    FileUploadResponse,
)
from deepagents.backends.sandbox import BaseSandbox

from capsule_sdk import (
    Capsule,
    CapsuleClient,
    CapsuleError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
)

# What deepagents explains to a model by itself; anything else it is told in our words.
KNOWN = {
    NotFoundError: "file_not_found",
    ForbiddenError: "permission_denied",
    InvalidError: "invalid_path",
}


class CapsuleSandbox(BaseSandbox):
    """A sandbox of Capsule as a backend of deepagents. Whoever made the sandbox ends it."""

    def __init__(self, capsule: Capsule) -> None:
        self.capsule = capsule

    @property
    def id(self) -> str:
        return str(self.capsule.id)

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        # Both streams in one, in the order in which they were written.
        argv = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", "/bin/bash", "-c", "--", command]
        done = self.capsule.exec(argv, timeout=timeout or None)
        output = done.stdout
        if done.timed_out:
            output += f"\n[timed out after {done.duration_ms / 1000:.0f} seconds]"
        return ExecuteResponse(output, done.exit_code, done.stdout_truncated)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [self._upload(path, content) for path, content in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [self._download(path) for path in paths]

    def _upload(self, path: str, content: bytes) -> FileUploadResponse:
        try:
            self.capsule.write_file(path, content)
        except CapsuleError as error:
            return FileUploadResponse(path, KNOWN.get(type(error), str(error)))
        return FileUploadResponse(path)

    def _download(self, path: str) -> FileDownloadResponse:
        try:
            return FileDownloadResponse(path, self.capsule.read_file(path))
        except CapsuleError as error:
            return FileDownloadResponse(path, error=KNOWN.get(type(error), str(error)))


if __name__ == "__main__":
    if "MODEL" not in os.environ:
        sys.exit("set MODEL=PROVIDER:NAME, as LangChain's init_chat_model takes it")
    task = " ".join(sys.argv[1:]) or "Write a prime sieve in /workspace/sieve.py, and test it."
    with CapsuleClient() as client, client.create("python", ttl=3600) as capsule:
        agent = create_deep_agent(os.environ["MODEL"], backend=CapsuleSandbox(capsule))
        state = agent.invoke({"messages": [{"role": "user", "content": task}]})
        print(state["messages"][-1].content)
        print([entry.path for entry in capsule.list_dir()])

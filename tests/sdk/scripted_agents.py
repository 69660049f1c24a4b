"""The agents of examples/ with a model that follows a script, so that no network is needed.

Run by tests/sdk/test_agents.py under a Python that has the frameworks; prints what happened as
JSON, all in one process: to import the frameworks takes longer than anything else.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from capsule_sdk import CapsuleClient, SandboxClient

Reply = Callable[[list[BaseMessage]], AIMessage]


class ScriptedModel(BaseChatModel):
    """Gives its replies in order; each may look at the messages before."""

    script: list[Reply]
    tools: list[str]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        self.tools = [getattr(each, "name", str(each)) for each in tools]
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **options: Any) -> ChatResult:
        reply = self.script.pop(0)(messages)
        return ChatResult(generations=[ChatGeneration(message=reply)])


def calls(name: str, **arguments: Any) -> Reply:
    made = {"name": name, "args": arguments, "id": f"call-{name}"}
    return lambda messages: AIMessage("", tool_calls=[made])


def says(prefix: str) -> Reply:
    """The last result of a tool, as the answer."""
    return lambda messages: AIMessage(f"{prefix}{messages[-1].content}")


def langgraph(url: str) -> dict[str, Any]:
    from langgraph_agent import ask, build_agent

    code = "print(sum(all(n % d for d in range(2, n)) for n in range(2, 100)))"
    model = ScriptedModel(
        tools=[],
        script=[
            calls("bash", command=f"cat > primes.py <<'E'\n{code}\nE"),
            calls("bash", command="python3 primes.py"),
            calls("bash", command="sleep 60", timeout=0.2),
            says("found: "),
        ],
    )
    with SandboxClient(url) as client:
        state = build_agent(model, client).invoke({"messages": [("user", "primes?")]})
    told = [m.content for m in state["messages"] if isinstance(m, ToolMessage)]
    asked = ask(ScriptedModel(tools=[], script=[says("you asked: ")]), "hello?", url)
    return {"tools": model.tools, "told": told, "last": state["messages"][-1].content, "ask": asked}


def deepagents(url: str) -> dict[str, Any]:
    from deep_agent import CapsuleSandbox
    from deepagents import create_deep_agent

    model = ScriptedModel(
        tools=[],
        script=[
            calls("write_file", file_path="/workspace/a.py", content="print(6 * 7)\n"),
            calls("edit_file", file_path="/workspace/a.py", old_string="7", new_string="8"),
            calls("execute", command="python3 /workspace/a.py; echo err >&2; exit 4"),
            calls("read_file", file_path="/workspace/a.py"),
            calls("ls", path="/workspace"),
            calls("grep", pattern="print", path="/workspace"),
            says("done: "),
        ],
    )
    with CapsuleClient(url) as client, client.create("python") as capsule:
        backend = CapsuleSandbox(capsule)
        agent = create_deep_agent(model, backend=backend)
        state = agent.invoke({"messages": [("user", "work")]})
        sent = backend.upload_files([("b/x.bin", b"\0\xff"), ("../x", b""), ("/etc/x", b"")])
        got = backend.download_files(["b/x.bin", "nope"])
        late = backend.execute("sleep 60", timeout=1)
        return {
            "id": backend.id == capsule.id,
            "told": [m.content for m in state["messages"] if isinstance(m, ToolMessage)],
            "file": capsule.read_file_text("a.py"),
            "sent": [each.error for each in sent],
            "got": [each.content.hex() if each.content else each.error for each in got],
            "late": [late.exit_code != 0, late.output.strip()],
        }


def without_a_model(name: str) -> str:
    os.environ.pop("MODEL", None)
    try:
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / name), run_name="__main__")
    except SystemExit as ended:
        return str(ended)
    return ""


def main(url: str) -> dict[str, Any]:
    return {
        "langgraph": langgraph(url),
        "deepagents": deepagents(url),
        "without": [without_a_model("langgraph_agent.py"), without_a_model("deep_agent.py")],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))

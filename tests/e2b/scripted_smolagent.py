"""smolagents at work in sandboxes, with a model that follows a script. Run by the Python of
tests/support/frameworks.py; prints what happened as JSON.
"""

from __future__ import annotations

import json
from typing import Any

from smolagents import ChatMessage, MessageRole, Model
from smolagents.monitoring import AgentLogger, LogLevel
from smolagents.remote_executors import E2BExecutor
from smolagents_agent import ask

STEPS = [
    "Thought: count them.\n<code>\nprimes = [n for n in range(2, 100) if all(n % d for d in"
    " range(2, n))]\nprint(len(primes))\n</code>",
    "Thought: I have it.\n<code>\nfinal_answer(len(primes))\n</code>",
]


class Scripted(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def generate(self, messages: list[Any], **kwargs: Any) -> ChatMessage:
        self.seen.append(str(messages[-1].content))
        return ChatMessage(role=MessageRole.ASSISTANT, content=STEPS[len(self.seen) - 1])


# What tells an answer looks for their types. E2B's sandboxes have both; this answer is of neither.
NAMES = {
    "numpy.py": "ndarray = integer = floating = type('', (), {})",
    "PIL/__init__.py": "",
    "PIL/Image.py": "Image = type('Image', (), {})",
}


def executor() -> E2BExecutor:
    made = E2BExecutor([], AgentLogger(level=LogLevel.OFF))
    ask = "import site; print(site.getusersitepackages())"
    folder = made.sandbox.commands.run(f"python3 -c '{ask}'").stdout.strip()
    for name, text in NAMES.items():
        made.sandbox.files.write(f"{folder}/{name}", text)
    return made


def main() -> None:
    model = Scripted()
    answer = ask(model, "How many primes are below 100?", executor())
    print(json.dumps({"answer": answer, "saw": "25" in model.seen[-1]}))


if __name__ == "__main__":
    main()

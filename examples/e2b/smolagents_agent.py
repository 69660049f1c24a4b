"""An agent of smolagents that runs its code in a sandbox, with any model that smolagents knows:

pip install 'smolagents[e2b]'
MODEL=NAME python examples/e2b/smolagents_agent.py 'How many primes are below 10000?'

Answers are told with numpy and pillow, which the sandbox's Python must have: the machine's own for
the local provider, else the image's (`capsule template build code-interpreter-v1`).
"""

import os
import sys

from smolagents import CodeAgent, InferenceClientModel, Model
from smolagents.monitoring import AgentLogger, LogLevel
from smolagents.remote_executors import E2BExecutor


def ask(model: Model, question: str, executor: E2BExecutor | None = None) -> object:
    executor = executor or E2BExecutor([], AgentLogger(level=LogLevel.INFO))
    with CodeAgent(tools=[], model=model, executor=executor) as agent:
        return agent.run(question)


def main() -> None:
    if not (name := os.environ.get("MODEL")):
        sys.exit("set MODEL to the name of a model")
    print(ask(InferenceClientModel(name), sys.argv[1]))


if __name__ == "__main__":
    main()

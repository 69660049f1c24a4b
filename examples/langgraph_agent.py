"""A LangGraph agent whose tool is a sandbox. It works with every model that LangChain knows:

pip install langgraph langchain    # and the package of your model's provider
MODEL=PROVIDER:NAME python examples/langgraph_agent.py 'How many primes are below 10000?'
"""

from __future__ import annotations

import os
import sys

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import BaseTool, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from capsule_sdk import CapsuleError, SandboxClient


def sandbox_tool(client: SandboxClient) -> BaseTool:
    """The session as a LangChain tool, also for agents that are made otherwise."""

    @tool
    def bash(command: str, timeout: float = 30.0) -> str:
        """Run a bash command in a sandbox with Python and without network. Files in /workspace
        stay for the next command, the directory and variables do not.
        """
        try:
            result = client.execute(command, timeout=timeout)
        except CapsuleError as error:  # something for the model to read, not for us to fail with
            return f"not run: {error}"
        return f"{result['output'].rstrip()}\n[exit code {result['exit_code']}]"

    return bash


def build_agent(model: BaseChatModel, client: SandboxClient) -> CompiledStateGraph:
    """The model decides, the sandbox runs, until the model has nothing more to run."""
    tools = [sandbox_tool(client)]
    bound = model.bind_tools(tools)

    def decide(state: MessagesState) -> MessagesState:
        return {"messages": [bound.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", decide)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def ask(model: BaseChatModel, question: str, url: str | None = None) -> str:
    with SandboxClient(url) as client:
        state = build_agent(model, client).invoke({"messages": [HumanMessage(question)]})
    return str(state["messages"][-1].content)


if __name__ == "__main__":
    from langchain.chat_models import init_chat_model

    if "MODEL" not in os.environ:
        sys.exit("set MODEL=PROVIDER:NAME, as LangChain's init_chat_model takes it")
    question = " ".join(sys.argv[1:]) or "How many primes are below 10000? Compute it."
    print(ask(init_chat_model(os.environ["MODEL"]), question))

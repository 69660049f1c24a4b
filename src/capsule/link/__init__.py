"""The host's end of the agent's wire."""

from capsule.link.collect import Collected
from capsule.link.exec_stream import ExecStream, Gap, Output
from capsule.link.files import FileReader, Listing
from capsule.link.link import AgentLink
from capsule.link.protocol import ProtocolError
from capsule.link.unix import connect_unix
from capsule.link.watch import Change

__all__ = [
    "AgentLink",
    "Change",
    "Collected",
    "ExecStream",
    "FileReader",
    "Gap",
    "Listing",
    "Output",
    "ProtocolError",
    "connect_unix",
]

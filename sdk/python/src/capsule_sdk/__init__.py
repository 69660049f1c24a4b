"""Python client of Capsule, the self-hosted sandbox for untrusted code.

from capsule_sdk import CapsuleClient

client = CapsuleClient("http://localhost:8080")
with client.create("python") as capsule:
    print(capsule.run("print(sum(range(10)))").stdout)
"""

from ._client import AsyncCapsuleClient, CapsuleClient
from ._contexts import AsyncContext, Context
from ._exec import AsyncExecStream, ExecStream
from ._keys import AsyncKeys, KeyInfo, Keys
from ._runs import ContextInfo, Printed, Result, RunEnd, RunError, RunEvent, RunResult
from ._sandbox import AsyncCapsule, Capsule
from ._sessions import (
    ArtifactInfo,
    AsyncSessions,
    Execution,
    SessionFile,
    SessionInfo,
    Sessions,
)
from ._snapshots import AsyncSnapshots, Snapshots
from ._templates import AsyncBuild, AsyncTemplates, Build, Templates
from ._tenants import AsyncTenants, TenantInfo, Tenants
from ._volumes import AsyncVolumes, Volumes
from ._webhooks import AsyncWebhooks, Webhooks, verify_webhook
from .errors import (
    CapacityError,
    CapsuleError,
    ConflictError,
    ExecFailedError,
    ForbiddenError,
    GoneError,
    InternalError,
    InvalidError,
    NoSpaceError,
    NotFoundError,
    NotSupportedError,
    RunFailedError,
    TooLargeError,
    UnauthenticatedError,
    UnavailableError,
    WrongStateError,
)
from .sandbox_client import SandboxClient
from .terminal import AsyncTerminal, Terminal
from .values import (
    Change,
    DeliveryInfo,
    Event,
    ExecInfo,
    ExecResult,
    Exit,
    FileChange,
    FileInfo,
    Gap,
    ImageInfo,
    Limits,
    Metrics,
    Output,
    PoolInfo,
    SandboxInfo,
    ShelfInfo,
    SnapshotInfo,
    StepInfo,
    TemplateInfo,
    Transfer,
    Unenforced,
    VolumeInfo,
    WebhookInfo,
    Written,
)

__version__ = "0.1.0"

__all__ = [
    "ArtifactInfo",
    "AsyncBuild",
    "AsyncCapsule",
    "AsyncCapsuleClient",
    "AsyncContext",
    "AsyncExecStream",
    "AsyncKeys",
    "AsyncSessions",
    "AsyncSnapshots",
    "AsyncTemplates",
    "AsyncTenants",
    "AsyncTerminal",
    "AsyncVolumes",
    "AsyncWebhooks",
    "Build",
    "CapacityError",
    "Capsule",
    "CapsuleClient",
    "CapsuleError",
    "Change",
    "ConflictError",
    "Context",
    "ContextInfo",
    "DeliveryInfo",
    "Event",
    "ExecFailedError",
    "ExecInfo",
    "ExecResult",
    "ExecStream",
    "Execution",
    "Exit",
    "FileChange",
    "FileInfo",
    "ForbiddenError",
    "Gap",
    "GoneError",
    "ImageInfo",
    "InternalError",
    "InvalidError",
    "KeyInfo",
    "Keys",
    "Limits",
    "Metrics",
    "NoSpaceError",
    "NotFoundError",
    "NotSupportedError",
    "Output",
    "PoolInfo",
    "Printed",
    "Result",
    "RunEnd",
    "RunError",
    "RunEvent",
    "RunFailedError",
    "RunResult",
    "SandboxClient",
    "SandboxInfo",
    "SessionFile",
    "SessionInfo",
    "Sessions",
    "ShelfInfo",
    "SnapshotInfo",
    "Snapshots",
    "StepInfo",
    "TemplateInfo",
    "Templates",
    "TenantInfo",
    "Tenants",
    "Terminal",
    "TooLargeError",
    "Transfer",
    "UnauthenticatedError",
    "UnavailableError",
    "Unenforced",
    "VolumeInfo",
    "Volumes",
    "WebhookInfo",
    "Webhooks",
    "Written",
    "WrongStateError",
    "verify_webhook",
]

"""The SDK's names are a promise: adding one is a decision, losing one is a new major version."""

from __future__ import annotations

import capsule_sdk

NAMES = """
ArtifactInfo AsyncBuild AsyncCapsule AsyncCapsuleClient AsyncContext AsyncExecStream AsyncKeys
AsyncSessions AsyncSnapshots AsyncTemplates AsyncTenants AsyncTerminal AsyncVolumes AsyncWebhooks
Build CapacityError Capsule CapsuleClient CapsuleError Change ConflictError Context ContextInfo
DeliveryInfo Event ExecFailedError ExecInfo ExecResult ExecStream Execution Exit FileChange FileInfo
ForbiddenError Gap GoneError ImageInfo InternalError InvalidError KeyInfo Keys Limits Metrics
NoSpaceError NotFoundError NotSupportedError Output PoolInfo Printed Result RunEnd RunError RunEvent
RunFailedError RunResult SandboxClient SandboxInfo SessionFile SessionInfo Sessions ShelfInfo
SnapshotInfo Snapshots StepInfo TemplateInfo Templates TenantInfo Tenants Terminal TooLargeError
Transfer UnauthenticatedError UnavailableError Unenforced VolumeInfo Volumes WebhookInfo Webhooks
Written WrongStateError verify_webhook
""".split()

CLIENT = "aclose close connect create get list pool".split()
SANDBOX = """
attach batch connect_terminal context contexts delete diff download exec execs exists fork info
keep_alive kill list_dir metrics mkdir move pause read_file read_file_text read_stream refresh
remove reset resume run run_code send_input set_timeout snapshot start stat steps stream undo upload
watch write_file
""".split()


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_names_of_the_package() -> None:
    assert sorted(capsule_sdk.__all__) == sorted(NAMES)
    assert all(hasattr(capsule_sdk, name) for name in NAMES)


def test_methods_of_both_clients() -> None:
    assert public(capsule_sdk.CapsuleClient) == set(CLIENT) - {"aclose"}
    assert public(capsule_sdk.AsyncCapsuleClient) == set(CLIENT) - {"close"}


def test_both_sandboxes_have_the_same_methods() -> None:
    assert public(capsule_sdk.Capsule) == public(capsule_sdk.AsyncCapsule)
    assert public(capsule_sdk.Capsule) | {"info"} == set(SANDBOX)


def test_both_kinds_of_snapshots_have_the_same_methods() -> None:
    for cls in (capsule_sdk.Snapshots, capsule_sdk.AsyncSnapshots):
        assert public(cls) == {"delete", "export", "get", "import_", "list"}


def test_both_kinds_of_volumes_have_the_same_methods() -> None:
    for cls in (capsule_sdk.Volumes, capsule_sdk.AsyncVolumes):
        assert public(cls) == {"create", "delete", "get", "list"}


def test_both_kinds_of_webhooks_have_the_same_methods() -> None:
    for cls in (capsule_sdk.Webhooks, capsule_sdk.AsyncWebhooks):
        assert public(cls) == {"create", "delete", "deliveries", "get", "list", "redeliver"}


def test_both_kinds_of_templates_have_the_same_methods() -> None:
    for cls in (capsule_sdk.Templates, capsule_sdk.AsyncTemplates):
        assert public(cls) == {"build", "delete", "get", "list"}
    assert public(capsule_sdk.Build) == public(capsule_sdk.AsyncBuild) == {"template", "wait"}


def test_both_contexts_have_the_same_methods() -> None:
    for cls in (capsule_sdk.Context, capsule_sdk.AsyncContext):
        methods = "delete id interrupt language refresh restart run stream"
        assert public(cls) == set(methods.split())


def test_both_kinds_of_sessions_have_the_same_methods() -> None:
    wanted = """
    artifacts call_tool close create delete execute executions files get list read_artifact
    read_file reopen stream_artifact tools write_file
    """
    for cls in (capsule_sdk.Sessions, capsule_sdk.AsyncSessions):
        assert public(cls) == set(wanted.split())

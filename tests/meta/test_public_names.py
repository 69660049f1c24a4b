"""The SDK's names are a promise: a new one is a decision, a lost one a new major version."""

from __future__ import annotations

import inspect

import pytest

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

METHODS = {
    "Build": "template wait",
    "Capsule": """
        attach batch connect_terminal context contexts delete diff download exec execs exists fork
        keep_alive kill list_dir metrics mkdir move pause read_file read_file_text read_stream
        refresh remove reset resume run run_code send_input set_timeout snapshot start stat steps
        stream undo upload watch write_file
    """,
    "CapsuleClient": "close connect create get list pool",
    "Context": "delete id interrupt language refresh restart run stream",
    "ExecStream": "close_input exec_id exit kill resize send_input wait",
    "Sessions": """
        artifacts call_tool close create delete execute executions files get list read_artifact
        read_file reopen stream_artifact tools write_file
    """,
    "Snapshots": "delete export get import_ list",
    "Templates": "build delete get list",
    "Terminal": "close code exit open reason recv resize send",
    "Volumes": "create delete get list",
    "Webhooks": "create delete deliveries get list redeliver",
}


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_names_of_the_package() -> None:
    assert sorted(capsule_sdk.__all__) == sorted(NAMES)
    assert all(hasattr(capsule_sdk, name) for name in NAMES)


@pytest.mark.parametrize("name", METHODS)
def test_both_clients_have_the_same_methods_and_arguments(name: str) -> None:
    plain, awaited = getattr(capsule_sdk, name), getattr(capsule_sdk, f"Async{name}")
    assert public(plain) == set(METHODS[name].split())
    renamed = {"close": "aclose"} if "aclose" in public(awaited) else {}
    assert public(awaited) == {renamed.get(method, method) for method in public(plain)}
    for method in public(plain):
        ours, theirs = getattr(plain, method), getattr(awaited, renamed.get(method, method))
        if inspect.isfunction(ours) and inspect.isfunction(theirs):
            signatures = [inspect.signature(each).parameters.values() for each in (ours, theirs)]
            assert list(signatures[0]) == list(signatures[1]), method

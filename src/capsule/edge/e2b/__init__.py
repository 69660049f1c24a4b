"""E2B's API, so that its SDKs drive Capsule unchanged. Thin: every call becomes one of the
service's.

    doors        which sandbox and which of its ports a request is for, if any
    control      /sandboxes, /v2/sandboxes, …: beside our own REST routes, with E2B's shapes
    volumes, templates   the same for those; volume_content and uploads ask for tokens, not keys
    envd         port 49983: processes, files, terminals, watches (Connect with JSON, `connect`)
    interpreter  port 49999: code in contexts, a line of JSON per event
    ports        any other port: what listens there inside the sandbox
    access       the token of a sandbox, which envd asks for instead of a key
"""

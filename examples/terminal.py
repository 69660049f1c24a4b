"""A shell in a sandbox, driven by a program. For one of your own: `capsule shell ID`."""

from capsule_sdk import CapsuleClient

client = CapsuleClient()  # at CAPSULE_URL, or http://localhost:8080

with client.create("bash") as capsule:
    # The quotes keep the echo of what is typed from looking like its result.
    with capsule.connect_terminal(rows=24, cols=80) as terminal:
        terminal.send("cd /tmp && export GREETING=hello && echo do''ne\n")
        seen = b""
        while b"done" not in seen and (data := terminal.recv(timeout=10)):
            seen += data

    # The connection is closed, the shell goes on: coming back is the same shell.
    with capsule.connect_terminal() as terminal:
        terminal.send('echo "$GREETING from $PWD"; exit\n')
        screen = b"".join(terminal).decode()

    print("hello from /tmp" in screen)
    print(terminal.reason)

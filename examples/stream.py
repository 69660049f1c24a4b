"""Follow a program's output while it runs, and type into it."""

from capsule_sdk import CapsuleClient, Exit, Output

client = CapsuleClient()  # at CAPSULE_URL, or http://localhost:8080

with client.create("python") as capsule:
    slowly = "import time\nfor i in range(3):\n    print('tick', i)\n    time.sleep(0.1)"
    for event in capsule.stream(code=slowly):
        match event:
            case Output(stream="stdout"):
                print(event.text, end="")
            case Exit():
                print(f"{event.reason} with {event.exit_code}")

    # A program that reads: start it, write to it, close its input, read to the end.
    adder = capsule.start(["awk", "{ sum += $1 } END { print sum }"], stdin_open=True)
    capsule.send_input(adder.exec_id, "20\n")
    capsule.send_input(adder.exec_id, "22\n", eof=True)
    print("".join(event.text for event in adder if isinstance(event, Output)), end="")

"""Restore points: each exec leaves one, `diff` says what it did, `undo` takes it back."""

from capsule_sdk import CapsuleClient

with CapsuleClient() as client, client.create("bash", checkpoint="each") as capsule:
    capsule.exec("mkdir report && echo draft > report/text && echo 1 > version")
    capsule.exec("echo final > report/text && echo 2 > version")
    capsule.exec("rm -r report")  # by mistake

    for step in capsule.steps():
        print(step.step, step.cmd or "as it began")
    for change in capsule.diff(2, 3):
        print(f"step 3 {change.change} {change.path}")

    capsule.undo(2)
    print(capsule.exec("cat report/text version").stdout.split())

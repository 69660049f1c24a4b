"""Create a sandbox, run code, use its files. `make run` first, or name a server in CAPSULE_URL."""

from capsule_sdk import CapsuleClient

client = CapsuleClient()  # at CAPSULE_URL, or http://localhost:8080

# The context manager deletes the sandbox at its end.
with client.create("python") as capsule:
    result = capsule.run("print(sum(range(10)))")
    print(result.stdout, end="")

    capsule.write_file("/workspace/data.csv", "city,people\nOslo,717710\nRome,2748109\n")
    code = """
import csv
rows = csv.DictReader(open("data.csv"))
print(max(rows, key=lambda row: int(row["people"]))["city"])
"""
    print(capsule.run(code).stdout, end="")
    print([entry.name for entry in capsule.list_dir("/workspace")])

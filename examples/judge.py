"""A tiny programming contest: many hostile solutions, one verdict each, all at once."""

import asyncio

from capsule_sdk import AsyncCapsuleClient, ExecResult

TASK_INPUT, EXPECTED = "6 7\n", "42"
SOLUTIONS = {
    "ada": "a, b = map(int, input().split())\nprint(a * b)",
    "bob": "print(41)",
    "eve": "while True: pass",
    "mallory": "import os\nwhile True: os.fork()",
    "oscar": "x = bytearray(400 << 20)\nprint(len(x))",
    "trudy": "print(open('/etc/shadow').read())",
}


def verdict(result: ExecResult) -> str:
    match result.reason:
        case "timed_out":
            return "too slow"
        case "oom_killed":
            return "too much memory"
        case "exited" if result.exit_code == 0:
            return "correct" if result.stdout.strip() == EXPECTED else "wrong answer"
        case _:
            return "crashed"


async def judge(client: AsyncCapsuleClient, name: str, code: str) -> str:
    async with await client.create("python", memory=128 << 20, processes=16) as capsule:
        result = await capsule.run(code, stdin=TASK_INPUT, timeout=2.0)
        return f"{name}: {verdict(result)}"


async def main() -> None:
    async with AsyncCapsuleClient() as client:  # at CAPSULE_URL, or http://localhost:8080
        for line in await asyncio.gather(*(judge(client, *each) for each in SOLUTIONS.items())):
            print(line)


if __name__ == "__main__":
    asyncio.run(main())

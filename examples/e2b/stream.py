"""Output as it comes, from code and from commands."""

import asyncio

from e2b_code_interpreter import AsyncSandbox

CODE = """
import time
for n in range(3):
    print("step", n)
    time.sleep(0.1)
n * 14
"""


async def main() -> None:
    sandbox = await AsyncSandbox.create()
    try:
        ran = await sandbox.run_code(CODE, on_stdout=lambda message: print("code:", message.line))
        print("result:", ran.text)
        await sandbox.commands.run(
            "for n in 1 2 3; do echo command $n; sleep 0.1; done",
            on_stdout=lambda text: print("command:", text),
        )
    finally:
        await sandbox.kill()


asyncio.run(main())

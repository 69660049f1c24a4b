"""Draws docs/assets/capsule.svg: commands that are run for real, and what they really print.

python docs/picture.py      needs a working `capsule` beside this Python
"""

from __future__ import annotations

import os
import subprocess
import sys
from html import escape
from pathlib import Path

TARGET = Path(__file__).parent / "assets" / "capsule.svg"
COMMANDS = [
    "capsule run 'print(1+1)'",
    "capsule run 'import os; os.system(\"id; hostname; nproc; echo /*\")'",
    "capsule run --timeout 1s 'while True: pass'; echo \"exit status $?\"",
    "echo 'print(open(\"/etc/shadow\").read())' | capsule run - 2>&1 | tail -1",
    "capsule run --template node 'console.log([1, 2, 3].map(n => n * n))'",
    "time capsule run --template bash true",
]
WIDTH, LINE, LEFT = 940, 19, 18


def transcript() -> list[tuple[str, bool]]:
    """Lines of the terminal; True for what was typed."""
    beside = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": f"{beside}:{os.environ['PATH']}", "TIMEFORMAT": "%R s"}
    lines: list[tuple[str, bool]] = []
    for command in COMMANDS:
        lines.append((f"$ {command}", True))
        ended = subprocess.run(
            ["bash", "-c", command],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/tmp",
        )
        lines += [(line, False) for line in ended.stdout.expandtabs().splitlines()]
    return lines


def draw(lines: list[tuple[str, bool]]) -> str:
    height = 52 + LINE * len(lines)
    texts = [
        f'<text x="{LEFT}" y="{50 + number * LINE}" class="{"typed" if typed else "told"}"'
        f' xml:space="preserve">{escape(line)}</text>'
        for number, (line, typed) in enumerate(lines)
    ]
    style = (
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
        ".typed{fill:#7ee787}.told{fill:#e6edf3}"
    )
    lights = "".join(
        f'<circle cx="{22 + 20 * n}" cy="18" r="6" fill="{colour}"/>'
        for n, colour in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' role="img"><title>capsule in a terminal</title><style>{style}</style>'
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>{lights}\n'
        + "\n".join(texts)
        + "\n</svg>\n"
    )


def main() -> None:
    lines = transcript()
    TARGET.write_text(draw(lines), encoding="utf-8")
    print("\n".join(line for line, _ in lines))


if __name__ == "__main__":
    main()

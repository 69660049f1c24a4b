"""An agent's session: tools that a model may call, a log, and files that outlive the sandbox.

The "model" here is a list of calls; put yours in its place.
"""

from __future__ import annotations

import os

import httpx

CALLS = [
    ("write_file", {"path": "sales.csv", "content": "city,n\nRome,3\nOslo,4\n"}),
    ("run_python", {"code": "rows = [l.split(',') for l in open('sales.csv')][1:]"}),
    ("run_python", {"code": "total = sum(int(n) for _, n in rows); total"}),
    ("run_python", {"code": "open('artifacts/total.txt', 'w').write(str(total))"}),
]


def main() -> None:
    url = os.environ.get("CAPSULE_URL", "http://localhost:8080")
    with httpx.Client(base_url=url, timeout=60) as http:
        session = http.post("/api/sessions", json={"agent": "code_executor"}).json()
        here = f"/api/sessions/{session['session_id']}"
        tools = http.get(f"{here}/tools", params={"format": "openai"}).json()["tools"]
        print("tools:", ", ".join(tool["function"]["name"] for tool in tools))
        artifacts = []
        for name, arguments in CALLS:
            did = http.post(f"{here}/tools/{name}", json={"arguments": arguments}).json()
            print(name, did["status"], *(result["text"] for result in did["results"]))
            artifacts += did["artifacts"]
        http.delete(here)  # the log and the artifacts stay
        for artifact in artifacts:
            print(artifact["name"], http.get(artifact["url"]).text)


if __name__ == "__main__":
    main()

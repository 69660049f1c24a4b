"""A web server in a sandbox, and its address for a browser."""

import time

import httpx
from e2b import Sandbox

with Sandbox.create() as sandbox:
    sandbox.files.write("site/index.html", "<h1>Served from a sandbox</h1>")
    sandbox.commands.run("python3 -m http.server 3000 --directory site", background=True)
    print(f"open http://{sandbox.get_host(3000)}/")
    # What has no name for `PORT-ID.localhost` sends two headers instead.
    port = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "3000"}
    api = sandbox.connection_config.api_url
    while (answer := httpx.get(f"{api}/", headers=port)).status_code == 502:
        time.sleep(0.05)  # it is not open yet
    print(answer.text)

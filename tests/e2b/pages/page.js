// Runs in a browser, as E2B's SDK would: asks a server of another origin, and tells its own what came of it.

const asked = new URLSearchParams(location.search);
const api = asked.get("api");
const story = {};

async function tell(name, act) {
  try {
    story[name] = await act();
  } catch (error) {
    story[name] = `${error.name}: ${error.message}`;
  }
}

const status = async (path, options) => (await fetch(api + path, options)).status;
const behind = (port, token) => ({
  "E2b-Sandbox-Id": asked.get("id"),
  "E2b-Sandbox-Port": String(port),
  ...(token ? { "X-Access-Token": token } : {}),
});

function execute(code, token = asked.get("token")) {
  const headers = { "Content-Type": "application/json", ...behind(49999, token) };
  return fetch(`${api}/execute`, { method: "POST", headers, body: JSON.stringify({ code }) });
}

async function streamed(code) {
  const reader = (await execute(code)).body.pipeThrough(new TextDecoderStream()).getReader();
  const pieces = [];
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) pieces.push(piece.value);
  const lines = pieces.join("").trim().split("\n").map(JSON.parse);
  return { pieces: pieces.length, said: lines.filter((line) => line.type === "stdout").map((line) => line.text) };
}

function upload(path, text) {
  const body = new FormData();
  body.append("file", new Blob([text]), path);
  const token = asked.get("token");
  return status(`/files?path=${encodeURIComponent(path)}`, { method: "POST", headers: behind(49983, token), body });
}

async function download(path) {
  const headers = behind(49983, asked.get("token"));
  return (await fetch(`${api}/files?path=${encodeURIComponent(path)}`, { headers })).text();
}

async function began(command) {
  const message = new TextEncoder().encode(JSON.stringify({ process: { cmd: "/bin/sh", args: ["-c", command] } }));
  const frame = new Uint8Array(5 + message.length);
  new DataView(frame.buffer).setUint32(1, message.length);
  frame.set(message, 5);
  const headers = {
    "Content-Type": "application/connect+json",
    "Connect-Protocol-Version": "1",
    "Keepalive-Ping-Interval": "50",
    ...behind(49983, asked.get("token")),
  };
  const answer = await fetch(`${api}/process.Process/Start`, { method: "POST", headers, body: frame });
  return (await answer.text()).includes(btoa("from a command\n"));
}

const SERVERS = `
import http.server, threading
def serve(port, **headers):
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(b"from a program")
        def log_message(self, *_): pass
    threading.Thread(target=http.server.HTTPServer(("", port), Page).serve_forever, daemon=True).start()
serve(3000, Access_Control_Allow_Origin="*")
serve(3001)
print("serving")
`;

const program = async (port) => (await fetch(`http://${port}-${asked.get("id")}.${asked.get("domain")}/`)).text();

async function owner() {
  const key = { "X-API-Key": asked.get("key") };
  const json = { ...key, "Content-Type": "application/json" };
  await tell("list", () => status("/v2/sandboxes", { headers: key }));
  await tell("create", async () => {
    const body = JSON.stringify({ templateID: "base", timeout: 60, secure: true });
    const answer = await fetch(`${api}/sandboxes`, { method: "POST", headers: json, body });
    const made = await answer.json();
    asked.set("id", made.sandboxID);
    asked.set("token", made.envdAccessToken);
    return answer.status;
  });
  await tell("upload", () => upload("/home/user/a page's.txt", "from a page"));
  await tell("download", () => download("/home/user/a page's.txt"));
  await tell("stream", () => streamed("import time\nfor n in range(3): print(n, flush=True); time.sleep(0.05)"));
  await tell("command", () => began("echo from a command"));
  await tell("servers", async () => (await streamed(SERVERS)).said);
  await tell("open program", () => program(3000));
  await tell("closed program", () => program(3001));
}

async function stranger() {
  const headers = { "X-API-Key": asked.get("key") };
  await tell("list", () => status("/v2/sandboxes", { headers }));
  await tell("delete", () => status(`/sandboxes/${asked.get("id")}`, { method: "DELETE", headers }));
  await tell("stream", () => streamed("print('as there')"));
  await tell("no token", async () => (await execute("1", "")).status);
  await tell("contexts", () => status("/contexts", { headers: behind(49999, asked.get("token")) }));
  await tell("contexts, no token", () => status("/contexts", { headers: behind(49999) }));
}

const told = (name) => fetch(`/told/${name}`, { method: "POST", body: JSON.stringify(story) });

if (location.hostname === "localhost") {
  stranger().then(() => told("stranger"));
} else {
  owner().then(() => {
    told("owner");
    const frame = document.createElement("iframe");
    frame.src = `http://localhost:${location.port}/?${asked}`;
    document.body.append(frame);
  });
}

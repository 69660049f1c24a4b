#!/usr/bin/env bash
# Sets everything up and serves on http://localhost:8080, as `make run` does. Options go to `capsule serve`:
# ./quickstart.sh --port 5000
set -euo pipefail
cd "$(dirname "$0")"
exec make --no-print-directory run ARGS="$*"

#!/usr/bin/env bash
# Starts an agent again and again, so that it works all night:
#
#     tools/night.sh claude        or: codex
#     tools/night.sh -- COMMAND    runs any command in the same sandbox, once
#
# The sandbox (bubblewrap) may write to this clone except prepare.py, tools/ and docs/, to the
# caches, to the agent's own folder and to a /tmp of its own. It can read all your files and use the network.
# On a machine that holds nothing of yours, SANDBOX=none goes without it. Ctrl-C ends the night.
set -euo pipefail
here=$(dirname "$(dirname "$(realpath "${BASH_SOURCE[0]}")")")
cd "$here"

export HOME=${HOME:-~} # not every service sets it

say() { echo "night.sh: $*" >&2; }

if [ "${1:-}" = -- ] && [ $# = 1 ]; then set --; fi # no command: show the usage
called="tools/night.sh $*"
case ${1:-} in
  claude)
    # Claude Code replaces its settings by a rename, which needs a folder that may be written. It
    # keeps them in this one, and not beside it, if the variable is set.
    export CLAUDE_CONFIG_DIR=${CLAUDE_CONFIG_DIR:-$HOME/.claude}
    own=$CLAUDE_CONFIG_DIR
    mkdir -p "$own"
    if [ -f ~/.claude.json ] && [ ! -e "$own/.claude.json" ]; then cp ~/.claude.json "$own/"; fi
    export BASH_DEFAULT_TIMEOUT_MS=600000 BASH_MAX_TIMEOUT_MS=600000 # a run takes six minutes
    agent=(claude --print --permission-mode acceptEdits --allowedTools Bash Edit Write Read --)
    ;;
  codex)
    own=${CODEX_HOME:-$HOME/.codex}
    # Its own sandbox would make .git read-only and hide GPUs.
    agent=(codex exec --dangerously-bypass-approvals-and-sandbox)
    ;;
  --)
    own=()
    shift
    ;;
  *)
    say "usage: tools/night.sh claude, or codex, or -- COMMAND"
    exit 2
    ;;
esac

git=$(realpath "$(git rev-parse --git-common-dir)")
tmp=$git/tmp # not in memory, which the runs need
cache=${AUTORESEARCH_CACHE:-$HOME/.cache/autoresearch}
export TORCHINDUCTOR_CACHE_DIR=$cache/inductor TRITON_CACHE_DIR=$cache/triton # outlive a night
may_write=("$here" "$git" "$cache" "${AUTORESEARCH_RUNS:-$here}"
  "${HF_HOME:-$HOME/.cache/huggingface}" "${UV_CACHE_DIR:-$HOME/.cache/uv}"
  "${UV_PROJECT_ENVIRONMENT:-$here}" "${own[@]}")
mkdir -p "$tmp" "${may_write[@]}"
sandbox=(bwrap --unshare-pid --die-with-parent --cap-drop ALL --unsetenv TMPDIR
  --ro-bind / / --dev-bind /dev /dev --proc /proc --bind "$tmp" /tmp)
# The sockets of other programs; through those in /run/WSL one starts programs of Windows.
for place in /run/user /run/WSL; do
  if [ -d $place ]; then sandbox+=(--tmpfs $place); fi
done
for place in "${may_write[@]}"; do
  place=$(realpath "$place") # bwrap does not follow links
  sandbox+=(--bind "$place" "$place")
done
for place in "$here"/{prepare.py,tools,docs}; do
  sandbox+=(--ro-bind "$place" "$place")
done
sandbox+=(--)
if [ "${SANDBOX:-}" = none ]; then
  sandbox=()
elif ! problem=$("${sandbox[@]}" true 2>&1); then
  say "the sandbox does not work here: $problem"
  say "Install bubblewrap; on Ubuntu see docs/manual.md. In a container that forbids it,"
  say "the container is the sandbox: put no keys there but the agent's, and run SANDBOX=none $called"
  exit 2
fi

if [ ! -v agent ]; then exec "${sandbox[@]}" "$@"; fi
if ! "${sandbox[@]}" "$1" --version > /dev/null 2>&1; then
  say "$1 does not start here: install it (on WSL in Ubuntu, not on Windows)"
  exit 2
fi
changed=$(git status --porcelain | head -1)
if [ ! -e results.tsv ] && [ -n "$changed" ]; then
  say "a night begins with what is committed, so commit or undo this first (git status): $changed"
  exit 2
fi
trap 'exit 130' INT TERM
wait=10
while true; do
  began=$SECONDS
  "${sandbox[@]}" "${agent[@]}" "Have a look at program.md, and go on with the experiments." \
    < /dev/null || true
  took=$((SECONDS - began))
  if [ $took -lt 120 ]; then # such as an expired login
    wait=$((wait < 900 ? 2 * wait : 1800))
  else
    wait=10
  fi
  say "$(date +%H:%M) the agent ended its turn after $took s; it starts again in $wait s"
  sleep $wait &
  wait $! # a trap does not wait for this
done

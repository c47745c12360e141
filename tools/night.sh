#!/usr/bin/env bash
# Starts an agent again and again, so that it works all night:
#
#     tools/night.sh claude            or: codex; options of yours may follow, such as --model NAME
#     tools/night.sh COMMAND ...       any other agent; its last argument will be the request
#     tools/night.sh -- COMMAND ...    runs any command in the same sandbox, once
#
# In the sandbox (bubblewrap) it can read all your files, use the network, and write to this clone
# except prepare.py, tools/ and docs/, to the caches and to its own folders. SANDBOX=none goes
# without, on a machine that holds nothing of yours.
set -euo pipefail
here=$(dirname "$(dirname "$(realpath "${BASH_SOURCE[0]}")")")
cd "$here"

say() { echo "night.sh: $*" >&2; }

called="tools/night.sh $*"
if [ "${1:-}" = -- ]; then
  once=yes
  shift
fi
if [ $# = 0 ] || [[ $1 = -* ]]; then
  say "usage: tools/night.sh claude, or codex, or COMMAND ..., or -- COMMAND ..."
  exit 2
fi
export HOME=${HOME:-~} # not every service sets it
name=${1##*/}
check=("$1" --version)
case $name in
  claude)
    # Claude Code replaces its settings by a rename, which needs a folder that may be written. It
    # keeps them in this one, and not beside it, if the variable is set.
    export CLAUDE_CONFIG_DIR=${CLAUDE_CONFIG_DIR:-$HOME/.claude}
    own=("$CLAUDE_CONFIG_DIR")
    mkdir -p "$own"
    if [ -f ~/.claude.json ] && [ ! -e "$own/.claude.json" ]; then cp ~/.claude.json "$own/"; fi
    # A run takes six minutes; in the background the client would end it.
    export BASH_DEFAULT_TIMEOUT_MS=600000 BASH_MAX_TIMEOUT_MS=600000
    export CLAUDE_CODE_DISABLE_BACKGROUND_TASKS=1 ENABLE_PROMPT_CACHING_1H=1
    export CLAUDE_CODE_RETRY_WATCHDOG=1 # waits while the service is overloaded
    options=("${@:2}" --print --permission-mode acceptEdits --tools Bash,Edit,Write,Read
      --allowedTools Bash Edit Write Read --)
    ;;
  codex)
    own=("${CODEX_HOME:-$HOME/.codex}")
    # Its own sandbox would make .git read-only and hide GPUs; a login shell may not find uv.
    options=(exec "${@:2}" --dangerously-bypass-approvals-and-sandbox -c allow_login_shell=false)
    ;;
  *)
    own=()
    options=("${@:2}")
    check=(bash -c 'type "$0"' "$1")
    for place in ~/{.,.config/,.cache/,.local/share/,.local/state/}"$name"; do
      if [ -d "$place" ]; then own+=("$place"); fi
    done
    ;;
esac

git=$(realpath "$(git rev-parse --git-common-dir)")
tmp=$git/tmp # not in memory, which the runs need
cache=${AUTORESEARCH_CACHE:-$HOME/.cache/autoresearch}
export TORCHINDUCTOR_CACHE_DIR=$cache/inductor TRITON_CACHE_DIR=$cache/triton # outlive a night
caches=${XDG_CACHE_HOME:-$HOME/.cache} # of others
may_write=("$here" "$git" "$cache" "${AUTORESEARCH_RUNS:-$here}"
  "${HF_HOME:-$caches/huggingface}" "${UV_CACHE_DIR:-$caches/uv}"
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

if [ -v once ]; then exec "${sandbox[@]}" "$@"; fi
if ! said=$(timeout -k 9 60 "${sandbox[@]}" "${check[@]}" 2>&1 < /dev/null); then
  said=${said##*$'\n'}
  say "$1 does not start here (on WSL install it in Ubuntu): ${said:-silence for a minute}"
  exit 2
fi
changed=$(git status --porcelain --untracked-files=no)
if [ ! -e results.tsv ] && [ -n "$changed" ]; then
  say "a night begins with what is committed, so commit or undo this first (git status):" \
    "${changed%%$'\n'*}"
  exit 2
fi

end_turn() { # ends what the agent left, except sessions of their own, as runs are
  kill $(jobs -p) "-$turn"
  for _ in {1..50}; do
    kill -0 "-$turn" || return 0
    sleep 0.1
  done
  kill -KILL "-$turn"
} 2> /dev/null
turn=none
trap 'trap "" INT TERM HUP; end_turn || true; rm -rf "$tmp"' EXIT
trap 'exit 130' INT TERM HUP
wait=10
while true; do
  find "$git" -name '*.lock' -type f -delete || true # left by a git that was killed
  began=$(date +%s)
  (trap - INT && exec setsid "${sandbox[@]}" "$1" "${options[@]}" \
    "Have a look at program.md, and go on with the experiments." < /dev/null) &
  turn=$!
  idle=0 # times ten minutes
  while kill -0 $turn 2> /dev/null && [ $idle -lt 6 ]; do
    before=${now:-}
    sleep 600 &
    wait -n $turn $! || true
    now=$(git rev-parse HEAD; stat -c %y run.log results.tsv 2>&1) || true
    if [ "$now" = "$before" ]; then idle=$((idle + 1)); else idle=0; fi
  done
  if [ $idle = 6 ]; then say "no line of a run, no row and no commit for an hour"; fi
  end_turn || true
  code=0
  wait $turn || code=$?
  took=$(($(date +%s) - began))
  if [ $code != 0 ] || [ $took -lt 120 ]; then # such as an expired login
    wait=$((wait < 900 ? 2 * wait : 1800))
  else
    wait=10
  fi
  say "$(date +%H:%M) the turn took $took s, exit code $code; the next one starts in $wait s"
  sleep $wait &
  wait $!
done

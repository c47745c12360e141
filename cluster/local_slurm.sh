#!/usr/bin/env bash
# A real Slurm of one node with two CPUs, for the tests: no systemd, no cgroups, nothing in /etc.
#
#   apt-get update && apt-get install -y slurm-wlm munge     the packages it needs, Debian's
#   cluster/local_slurm.sh start DIR                         as root; then: export SLURM_CONF=DIR/slurm.conf
#   cluster/local_slurm.sh stop DIR                          cancels what runs and ends the daemons that start recorded
#
# DIR holds configuration, key, socket, state, logs and process ids. Keep its path short: the socket's has 107 bytes.
set -euo pipefail
PATH=$PATH:/usr/sbin

die() {
    echo "error: $1" >&2
    exit 2
}

launch() { # NAME COMMAND...: in the background, with a log and a recorded id
    local name=$1
    shift
    setsid "$@" >"$dir/$name.out" 2>&1 </dev/null &
    echo "$!" >"$dir/$name.pid"
}

until_true() { # SECONDS COMMAND...
    local deadline=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [[ $SECONDS -lt $deadline ]] || return 1
        sleep 0.2
    done
}

start() {
    local port=$((20000 + RANDOM % 10000)) host plugin
    host=$(hostname -s)
    for program in munged slurmctld slurmd; do
        command -v "$program" >/dev/null || die "there is no $program; run 'apt-get install slurm-wlm munge'."
    done
    [[ $EUID -eq 0 ]] || die "slurmd starts jobs as their users; run this as root."
    mkdir -p "$dir"/{state,spool}
    [[ ! -e $dir/slurmd.pid ]] || die "$dir is in use; stop it, or choose another folder."
    chmod 755 "$dir"
    (umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
    # slurmd loads a cgroup plugin even where nothing uses one: Slurm 22's v1 then does nothing, later ones do without.
    [[ $(slurmd -V) == *" 22."* ]] && plugin=cgroup/v1 || plugin=disabled
    echo "CgroupPlugin=$plugin" >"$dir/cgroup.conf"
    cat >"$dir/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/munge.socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.own.pid
SlurmdPidFile=$dir/slurmd.own.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=15
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=local Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    export SLURM_CONF=$dir/slurm.conf
    # --force: munged distrusts a folder below one that all may write to, such as /tmp.
    launch munged munged --foreground --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" \
        --pid-file="$dir/munged.own.pid" --seed-file="$dir/munged.seed" --log-file="$dir/munged.log"
    until_true 10 test -S "$dir/munge.socket" || die "munged did not start; see $dir/munged.out."
    launch slurmctld slurmctld -D -f "$SLURM_CONF"
    launch slurmd slurmd -D -f "$SLURM_CONF"
    until_true 30 idle || { stop && die "the node is not idle after 30 s; see slurmctld.log and slurmd.log in $dir."; }
    echo "ready: export SLURM_CONF=$SLURM_CONF"
}

idle() {
    [[ $(sinfo -h -o %T) == idle ]]
}

no_jobs() {
    [[ -z $(squeue -h) ]]
}

stop() {
    local name pid
    export SLURM_CONF=$dir/slurm.conf
    scancel --user=root 2>/dev/null || true
    until_true 30 no_jobs || true
    for name in slurmd slurmctld munged; do
        pid=$(cat "$dir/$name.pid" 2>/dev/null) || continue
        # An id may have gone to another process meanwhile: only one whose command names this folder is ended.
        if tr '\0' '\n' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF "$dir/"; then
            kill "$pid"
            until_true 20 gone "$pid" || die "$name, process $pid, does not end; try kill -9 $pid."
        fi
        rm "$dir/$name.pid"
    done
}

gone() { # or a zombie, where nothing reaps orphans
    ! grep -q . "/proc/$1/cmdline"
}

[[ $# -eq 2 && ($1 == start || $1 == stop) ]] || die "usage: $0 start|stop DIR"
dir=$(realpath -m -- "$2")
"$1"

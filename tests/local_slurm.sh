#!/usr/bin/env bash
# Runs a real Slurm of one node, two CPUs, for the tests: no systemd, no cgroups, nothing in /etc.
#
#   apt-get update && apt-get install -y slurm-wlm munge    install what it needs (Debian)
#   tests/local_slurm.sh start DIR                          start the daemons, as root
#   export SLURM_CONF=DIR/slurm.conf                        let sbatch and the others find it
#   tests/local_slurm.sh stop DIR                           cancel all jobs and end the daemons
#
# DIR holds configuration, key, socket, state, logs and process ids. Keep its path short: a socket's
# path has at most 107 bytes.
set -euo pipefail
PATH=$PATH:/usr/sbin

die() {
    echo "error: $1" >&2
    exit 2
}

# Starts a daemon in the background with a log, and writes down its process id.
launch() { # NAME COMMAND...
    local name=$1
    shift
    setsid "$@" >"$dir/$name.out" 2>&1 </dev/null &
    echo "$!" >"$dir/$name.pid"
}

until_true() { # SECONDS COMMAND...
    local deadline=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        if [[ $SECONDS -ge $deadline ]]; then
            return 1
        fi
        sleep 0.2
    done
}

idle() {
    [[ $(sinfo --noheader --format=%T) == idle ]]
}

no_jobs() {
    [[ -z $(squeue --noheader) ]]
}

# Also true of a zombie, which has an empty command and stays if nothing reaps orphans.
gone() { # PID
    ! grep -q . "/proc/$1/cmdline"
}

write_configuration() {
    local host
    host=$(hostname -s)
    local port=$((20000 + RANDOM % 10000))
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

    # slurmd loads a cgroup plugin even if nothing uses it. In Slurm 22 it can only be v1, which
    # then does nothing; later versions can be told to do without.
    local plugin=disabled
    if [[ $(slurmd -V) == *" 22."* ]]; then
        plugin=cgroup/v1
    fi
    echo "CgroupPlugin=$plugin" >"$dir/cgroup.conf"
}

start() {
    local program
    for program in munged slurmctld slurmd; do
        command -v "$program" >/dev/null ||
            die "there is no $program; run 'apt-get install slurm-wlm munge'."
    done
    [[ $EUID -eq 0 ]] || die "slurmd starts jobs as their users; run this as root."
    [[ ! -e $dir/slurmd.pid ]] || die "$dir is in use; stop it, or choose another folder."

    mkdir -p "$dir/state" "$dir/spool"
    chmod 755 "$dir"
    (
        umask 077
        head -c 1024 /dev/urandom >"$dir/munge.key"
    )
    write_configuration

    # --force: munged distrusts a folder inside a world-writable one, such as /tmp.
    launch munged munged --foreground --force \
        --key-file="$dir/munge.key" \
        --socket="$dir/munge.socket" \
        --pid-file="$dir/munged.own.pid" \
        --seed-file="$dir/munged.seed" \
        --log-file="$dir/munged.log"
    until_true 10 test -S "$dir/munge.socket" || die "munged did not start; see $dir/munged.out."
    launch slurmctld slurmctld -D -f "$SLURM_CONF"
    launch slurmd slurmd -D -f "$SLURM_CONF"
    if ! until_true 30 idle; then
        stop
        die "the node is not idle after 30 s; see slurmctld.log and slurmd.log in $dir."
    fi
    echo "ready: export SLURM_CONF=$SLURM_CONF"
}

stop() {
    scancel --user=root 2>/dev/null || true
    until_true 30 no_jobs || true
    local name pid
    for name in slurmd slurmctld munged; do
        if [[ ! -e $dir/$name.pid ]]; then
            continue
        fi
        pid=$(cat "$dir/$name.pid")
        # The id may belong to another process by now, so only a process whose command names this
        # folder is ended.
        if tr '\0' '\n' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF "$dir/"; then
            kill "$pid"
            until_true 20 gone "$pid" || die "$name, process $pid, does not end; try kill -9 $pid."
        fi
        rm "$dir/$name.pid"
    done
}

[[ $# -eq 2 ]] || die "usage: $0 start|stop DIR"
dir=$(realpath -m -- "$2")
export SLURM_CONF=$dir/slurm.conf
case $1 in
    start) start ;;
    stop) stop ;;
    *) die "usage: $0 start|stop DIR" ;;
esac

#!/usr/bin/env bash
# Runs every COMMIT with every SEED as one Slurm job array, and prints the results.
#
#   cluster/sweep.sh [-j N] FOLDER COMMIT... -- SEED... [-- SBATCH_OPTION...]
#                                       submit, at most N tasks at a time
#   cluster/sweep.sh --wait FOLDER      wait until the array has ended, then collect
#   cluster/sweep.sh --collect FOLDER   print a row for every task, at any time
#
# All nodes must see FOLDER. It gets tasks.tsv, job (the array's id), log/, runs/, status/ and
# inductor/ (compiled code).
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
UV_PROJECT_ENVIRONMENT=$(cd "$repo" && realpath -m -s -- "${UV_PROJECT_ENVIRONMENT:-.venv}")
export UV_PROJECT_ENVIRONMENT # for slurm.sbatch
python=$UV_PROJECT_ENVIRONMENT/bin/python
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE # which may name another repository

die() {
    echo "error: $1" >&2
    exit 2
}

submit() {
    local limit=
    if [[ ${1-} == -j ]]; then
        [[ ${2-} =~ ^[1-9][0-9]*$ ]] ||
            die "-j takes the number of tasks at a time, not '${2-}'."
        limit=%$2
        shift 2
    fi

    [[ $# -gt 0 && $1 != -* ]] ||
        die "the first argument is the sweep's folder; see the head of $0."
    local folder
    folder=$(realpath -m -- "$1")
    shift

    local commits=()
    local commit
    while [[ $# -gt 0 && $1 != -- ]]; do
        commit=$(git -C "$repo" rev-parse --verify --quiet --short "$1^{commit}") ||
            die "'$1' is not a commit of $repo."
        commits+=("$commit")
        shift
    done
    if [[ $# -gt 0 ]]; then
        shift # the first --
    fi

    local seeds=()
    while [[ $# -gt 0 && $1 != -- ]]; do
        [[ $1 =~ ^[0-9]+$ ]] ||
            die "'$1' is not a seed; seeds are whole numbers, after the commits and --."
        seeds+=("$1")
        shift
    done
    if [[ $# -gt 0 ]]; then
        shift # the second --; what is left goes to sbatch
    fi

    [[ ${#commits[@]} -gt 0 && ${#seeds[@]} -gt 0 ]] ||
        die "give commits, then --, then seeds; see the head of $0."
    [[ ! -e $folder/job ]] || die "$folder holds a sweep already; choose another folder."
    [[ -x $python ]] || die "there is no $python; run 'uv sync' first."
    command -v sbatch >/dev/null || die "there is no sbatch here; submit where Slurm is."

    mkdir -p "$folder/log" "$folder/runs" "$folder/status"
    local seed
    local count=0
    for commit in "${commits[@]}"; do
        for seed in "${seeds[@]}"; do
            printf '%d\t%s\t%s\n' "$count" "$commit" "$seed"
            count=$((count + 1))
        done
    done >"$folder/tasks.tsv"

    # In a log's name %a is the task's number, and %% is a percent sign.
    local answer
    answer=$(sbatch --parsable --array="0-$((count - 1))$limit" \
        --output="${folder//%/%%}/log/%a.log" "$@" "$repo/cluster/slurm.sbatch" "$repo" "$folder")
    local job=${answer%%;*} # a cluster's name may follow
    echo "$job" >"$folder/job"
    echo "job $job: $count tasks; next: $0 --wait $(printf %q "$folder")"
}

wait_for() { # FOLDER
    local job left
    job=$(cat "$1/job" 2>/dev/null) ||
        die "$1 was never submitted; give another folder, commits and seeds."
    command -v squeue >/dev/null || die "there is no squeue here; wait where Slurm is."
    while true; do
        left=$(squeue --noheader --jobs="$job" 2>&1) || true
        # Slurm forgets a job some minutes after its end, and then calls its id invalid.
        if [[ -z $left || $left == *"Invalid job id"* ]]; then
            return
        fi
        # Tasks are left, or squeue had no answer: ask again.
        sleep 5
    done
}

# Prints lines "TASK STATE", as far as Slurm remembers: for some minutes after a job's end.
states() { # FOLDER
    local job
    job=$(cat "$1/job" 2>/dev/null) || return 0
    squeue --noheader --array --states=all --jobs="$job" --format='%K %T' 2>/dev/null || true
}

collect() { # FOLDER
    "$python" "$repo/cluster/collect.py" "$1" "$(states "$1")"
}

case ${1-} in
    --wait | --collect)
        [[ $# -eq 2 ]] || die "$1 takes one folder."
        [[ -f $2/tasks.tsv ]] || die "$2 holds no tasks.tsv; give the folder of a sweep."
        if [[ $1 == --wait ]]; then
            wait_for "$2"
        fi
        collect "$2"
        ;;
    *)
        submit "$@"
        ;;
esac

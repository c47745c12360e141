#!/usr/bin/env bash
# Every COMMIT with every SEED as one Slurm job array, and the table of what came of it.
#
#   cluster/sweep.sh [-j N] FOLDER COMMIT... -- SEED... [-- SBATCH_OPTION...]   submit, at most N tasks at a time
#   cluster/sweep.sh --wait FOLDER                                              until the array has ended, then collect
#   cluster/sweep.sh --collect FOLDER                                           a row for every task, at any time
#
# FOLDER lies where all nodes see it and gets tasks.tsv, job (its id), log/, runs/, status/ and,
# where the cache is read-only, inductor/.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$repo/.venv/bin/python

die() {
    echo "error: $1" >&2
    exit 2
}

submit() {
    local limit= folder commits=() seeds=() commit seed job
    if [[ ${1-} == -j ]]; then
        [[ ${2-} =~ ^[1-9][0-9]*$ ]] || die "-j takes the number of tasks at a time, not '${2-}'."
        limit=%$2
        shift 2
    fi
    [[ $# -gt 0 && $1 != -* ]] || die "the first argument is the sweep's folder; see the head of $0."
    folder=$(realpath -m -- "$1")
    shift
    while [[ $# -gt 0 && $1 != -- ]]; do
        commit=$(git -C "$repo" rev-parse --verify --quiet --short "$1^{commit}") || die "'$1' is no commit of $repo."
        commits+=("$commit")
        shift
    done
    [[ $# -eq 0 ]] || shift
    while [[ $# -gt 0 && $1 != -- ]]; do
        [[ $1 =~ ^[0-9]+$ ]] || die "'$1' is no seed; seeds are whole numbers, behind the commits and --."
        seeds+=("$1")
        shift
    done
    [[ $# -eq 0 ]] || shift
    [[ ${#commits[@]} -gt 0 && ${#seeds[@]} -gt 0 ]] || die "give commits, then --, then seeds; see the head of $0."
    [[ ! -e $folder/job ]] || die "$folder holds a sweep already; choose another folder."
    [[ -x $python ]] || die "there is no $python; run 'uv sync' first."
    command -v sbatch >/dev/null || die "there is no sbatch here; submit where Slurm is."

    mkdir -p "$folder"/{log,runs,status}
    for commit in "${commits[@]}"; do
        for seed in "${seeds[@]}"; do printf '%s\t%s\n' "$commit" "$seed"; done
    done | awk '{ printf "%d\t%s\n", NR - 1, $0 }' >"$folder/tasks.tsv"
    job=$(sbatch --parsable --array="0-$((${#commits[@]} * ${#seeds[@]} - 1))$limit" \
        --output="${folder//%/%%}/log/%a.log" "$@" "$repo/cluster/slurm.sbatch" "$repo" "$folder")
    echo "${job%%;*}" >"$folder/job" # a cluster's name may follow
    echo "job ${job%%;*}: $((${#commits[@]} * ${#seeds[@]})) tasks; next: $0 --wait $(printf %q "$folder")"
}

# Lines "TASK STATE", as far as Slurm remembers: the controller some minutes, accounting, where it is kept, for long.
states() {
    local job
    job=$(cat "$1/job" 2>/dev/null) || return 0
    squeue -h -r -t all -j "$job" -o '%K %T' 2>/dev/null || [[ $(squeue -h -j "$job" 2>&1) == *"Invalid job id"* ]] ||
        echo "warning: squeue does not answer; what is called killed or cancelled may still wait or run." >&2
    sacct -nXP -j "$job" -o JobID,State 2>/dev/null | sed -n 's/^[0-9]*_\([0-9]*\)|\([A-Z_]*\).*/\1 \2/p' || true
}

case ${1-} in
    --wait | --collect)
        [[ $# -eq 2 ]] || die "$1 takes one folder."
        [[ -f $2/tasks.tsv ]] || die "$2 holds no tasks.tsv; give the folder of a sweep."
        if [[ $1 == --wait ]]; then
            job=$(cat "$2/job" 2>/dev/null) || die "$2 was never submitted; give another folder, commits and seeds."
            command -v squeue >/dev/null || die "there is no squeue here; wait where Slurm is."
            # An error other than that Slurm has forgotten the job means: ask again.
            while left=$(squeue -h -j "$job" 2>&1) || true; [[ $left && $left != *"Invalid job id"* ]]; do sleep 5; done
        fi
        "$python" "$repo/cluster/collect.py" "$2" "$(states "$2")"
        ;;
    *) submit "$@" ;;
esac

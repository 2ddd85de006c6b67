#!/bin/bash
#SBATCH --job-name=weightbus
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

# A trainer that publishes, a relay on each node, and workers: sbatch examples/slurm/job.sh
#
# 120 s before the time limit, this script gets SIGTERM (B: only the script). The trainer then ends
# after its current step, its last version is in the state folder, and the job is queued again.

set -u
cd "${EXAMPLE:-$SLURM_SUBMIT_DIR/examples/slurm}" || exit 1
run=${RUN:-$PWD/run-$SLURM_JOB_ID} # must be on a file system that all nodes share
export WEIGHTBUS_KEYS=$run/keys

ended='' trainer=''
trap 'ended=1; kill -TERM $trainer 2>/dev/null' TERM # srun passes the signal on to its tasks

# The script runs on the job's first node. The port depends on the job, and is below the ephemeral ports.
host=${SLURMD_NODENAME:-$(hostname)}
port=${PORT:-$((10000 + SLURM_JOB_ID % 10000 * 2))}
publisher=tcp://$host:$port
relay=ipc://@weightbus-$SLURM_JOB_ID # an abstract socket; the node's index follows

if [ ! -d "$WEIGHTBUS_KEYS" ]; then
    mkdir -p "$run" &&
        weightbus keygen "$WEIGHTBUS_KEYS" --relay 'node-*' &&
        weightbus keygen "$WEIGHTBUS_KEYS" 'rank-*' --at 'node-*' --at publisher || exit 1
fi

# SLURM_NODEID is set only in tasks.
srun --overlap --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 bash -c \
    "exec weightbus relay $publisher --bind $relay-\$SLURM_NODEID --model policy --name node-\$SLURM_NODEID" &
relays=$!
srun --overlap --ntasks="$SLURM_NTASKS" bash -c \
    "exec python worker.py $relay-\$SLURM_NODEID $publisher" &
workers=$!
srun --overlap --nodes=1 --ntasks=1 --nodelist="$host" \
    python trainer.py "tcp://0.0.0.0:$port" "$run/state" "${STEPS:-1000}" "$SLURM_NTASKS" &
trainer=$!
[ -z "$ended" ] || kill -TERM $trainer

# Wait for a process, which may have ended already. A signal to this script ends `wait` too early.
wait_for() {
    local code
    while
        wait "$1"
        code=$?
        kill -0 "$1" 2>/dev/null
    do :; done
    return $code
}

wait_for $trainer
code=$?
kill -TERM $workers $relays 2>/dev/null
wait_for $workers
wait_for $relays

if [ -n "$ended" ] && [ $code -ne 0 ]; then # steps are left
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code

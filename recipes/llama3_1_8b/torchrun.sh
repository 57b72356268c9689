#!/bin/sh
# One machine: ./torchrun.sh DATA [key=value ...]. PROCESSES (default 8) is the number of GPUs.
# The exit code is that of the run: 0 PASS, 1 error or FAIL, 2 INCONCLUSIVE or SUSPECT.
set -eu
data=$1
shift
exec te-plugin train recipe=llama3_1_8b data.path="$data" "$@" --nproc "${PROCESSES:-8}"

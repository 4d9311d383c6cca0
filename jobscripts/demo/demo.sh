#!/bin/sh
# The demo: measure how two small networks scale on two CPU slots, then train three jobs on them under
# MARBLE's policy, and show what one job after the other would have taken. Ends within three minutes.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
run=${DEMO_DIR:-demo-run}
rm -rf "$run"
mkdir -p "$run"
HPCSCHED_DATABASE=$PWD/$run/hpcsched.db
export HPCSCHED_DATABASE

echo "== 1. How do these models scale? (hpcsched profile run)"
hpcsched profile run "$here/digits.toml" --devices cpu:2 --seconds 2 --repeats 2 --warmup 1

echo
echo "== 2. Train them (hpcsched run)"
hpcsched run "$here/digits.toml" --devices cpu:2 --dir "$run/run" --compare exclusive --gantt "$run/gantt.svg"

echo
echo "== 3. Why did wide-cnn-a get what it got? (hpcsched explain)"
hpcsched explain wide-cnn-a --dir "$run/run"

if ! hpcsched status --dir "$run/run" --json | grep -q '"suspensions":[1-9]'; then
    echo
    echo "== No promotion paid on this machine just now (its cores are busy, or it has but one)."
    echo "   So here is one on six pretended GPUs: the MARBLE paper's second job set, 40 times faster than the clock."
    hpcsched run "$here/../marble/set2.toml" --devices replay:6@40 --dir "$run/paper" \
        --profiles marble-summit --policy-option promote=always --compare exclusive --gantt "$run/paper.svg"
fi

echo
echo "The Gantt chart is in $run/gantt.svg; the jobs' output and checkpoints are in $run/run/jobs."

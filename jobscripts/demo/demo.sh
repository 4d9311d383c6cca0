#!/bin/sh
# The demo: measure how two small networks scale on two CPU slots, then train three jobs on them under
# MARBLE's policy, and show what one job after the other would have taken. Ends within three minutes.
# DEMO_DIR, DEMO_JOBS, DEMO_PROFILE, DEMO_RUN and DEMO_SPEED make it another size; its test does so.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
run=${DEMO_DIR:-demo-run}
jobs=${DEMO_JOBS:-$here/digits.toml}
rm -rf "$run"
mkdir -p "$run"
run=$(cd "$run" && pwd)
HPCSCHED_DATABASE=$run/hpcsched.db
export HPCSCHED_DATABASE

echo "== 1. How do these models scale? (hpcsched profile run)"
# shellcheck disable=SC2086 # several words each, here and below
hpcsched profile run "$jobs" --devices cpu:2 ${DEMO_PROFILE:---seconds 2 --repeats 2 --warmup 1}

echo
echo "== 2. Train them (hpcsched run)"
# shellcheck disable=SC2086
hpcsched run "$jobs" --devices cpu:2 --dir "$run/run" --compare exclusive --gantt "$run/gantt.svg" ${DEMO_RUN:-}

echo
echo "== 3. Why did wide-cnn-a get what it got? (hpcsched explain)"
hpcsched explain wide-cnn-a --dir "$run/run"

# The jobs that have been suspended or resized in place; their names are one word each.
moved=$(hpcsched status --dir "$run/run" --states all --noheader -o "%j %S %z" |
    while read -r name suspensions resizes; do
        [ "$((suspensions + resizes))" -eq 0 ] || echo "$name"
    done)
echo
if [ -n "$moved" ]; then
    for name in $moved; do
        echo "== $name went over to other CPU slots while it trained:"
        hpcsched explain "$name" --dir "$run/run" | grep -E "promoted|in place|saved at step"
    done
else
    echo "== No job was promoted on this machine just now: by what was measured it did not pay."
    echo "   (That is so where its cores are busy, or where it has but one.)"
    echo "   So here is one on six pretended GPUs: the MARBLE paper's second job set, ${DEMO_SPEED:-40} times faster than the clock."
    hpcsched run "$here/../marble/set2.toml" --devices "replay:6@${DEMO_SPEED:-40}" --dir "$run/paper" \
        --profiles marble-summit --policy-option promote=always --compare exclusive --gantt "$run/paper.svg"
fi

echo
echo "The Gantt chart is in $run/gantt.svg; the jobs' output and checkpoints are in $run/run/jobs."

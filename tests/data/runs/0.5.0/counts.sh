#!/bin/bash
# A "training program" without any library: counts steps, and can be suspended and resumed.
#   command = ["bash", "plain.sh"], steps = 200; env = { STEP_S = "0.05" } sets the pace
LC_ALL=C
job=$HPCSCHED_RUN_DIR/jobs/$HPCSCHED_JOB_ID saved=$HPCSCHED_CHECKPOINT_DIR/count rank=${HPCSCHED_RANK:-0}
stop_file=$job/stop.$HPCSCHED_ATTEMPT step=0 stop=
trap 'stop=1' TSTP TERM # only take a note: the loop looks at it between two steps
trap '' PIPE
mkdir -p "$HPCSCHED_CHECKPOINT_DIR"
# Behind a launcher the descriptor may be gone, or another file by now.
[ "$(stat -Lc %d:%i "/proc/self/fd/$HPCSCHED_PROGRESS_FD" 2>/dev/null)" = "$HPCSCHED_PROGRESS_ID" ] || HPCSCHED_PROGRESS_FD=
if [ "$HPCSCHED_RESUME" = 1 ] && [ -f "$saved" ]; then step=$(cat "$saved"); fi

replace() { # file text: so that nobody ever sees half of it
    echo "$2" >"$1.tmp" && sync "$1.tmp" && mv "$1.tmp" "$1" && sync "$(dirname "$1")" || exit 74
}
save() {
    [ "$rank" = 0 ] || return 0
    replace "$saved" "$step"
    replace "$job/STATE.json" \
        "{\"step\": $step, \"samples\": $step, \"checkpoint\": \"$saved\", \"attempt\": $HPCSCHED_ATTEMPT}"
}
progress() {
    [ -z "$HPCSCHED_PROGRESS_FD" ] || echo "{\"step\": $step, \"t\": $EPOCHREALTIME}" >&"$HPCSCHED_PROGRESS_FD"
}
tell_agent() { # behind a launcher it does not see our exit code
    if [ "$PPID" = "$HPCSCHED_NOTIFY_PID" ]; then kill -USR1 "$PPID"; else : >"$job/left.$HPCSCHED_ATTEMPT"; fi
}

[ "$rank" != 0 ] || : >"$job/ready.$HPCSCHED_ATTEMPT"
while [ "$step" -lt "${HPCSCHED_STEPS:-100}" ]; do
    if [ -n "$stop" ] || [ -e "$stop_file" ]; then # behind a launcher there may be no signal
        save
        [ "$rank" != 0 ] || tell_agent
        exit 75
    fi
    (trap '' TSTP TERM; sleep "${STEP_S:-0.05}") # the training
    step=$((step + 1))
    progress
done
save

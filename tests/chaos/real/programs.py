"""Programs of chaos: each appends what it does to its job's ledger, a line a step.

A line: a word that no other process has, the attempt, the pid, what (`begin`, `step`, `saving`, `saved`,
`fail`, `left`, `done`), the step, and seconds of the host's monotonic clock. Lines are appended (O_APPEND)
beside the run directory, where no fault of a disk reaches them.
"""

from __future__ import annotations

CONTRACT = r'''
import errno, json, os, signal, subprocess, sys, time

env, options = os.environ, json.loads(sys.argv[1])
folder, attempt = env["HPCSCHED_JOB_DIR"], int(env["HPCSCHED_ATTEMPT"])
rank, steps = env.get("HPCSCHED_RANK", "0"), int(env["HPCSCHED_STEPS"])
word = os.urandom(6).hex()
flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
ledger = os.open(options["ledger"] + "/" + env["HPCSCHED_JOB_NAME"], flags, 0o600)
state, asked, step = folder + "/STATE.json", [], 0


def note(what, number):
    if rank == "0":
        line = f"{word} {attempt} {os.getpid()} {what} {number} {time.monotonic():.3f}\n"
        os.write(ledger, line.encode())


def put(path, text):
    """Made whole, or not at all; one that could not be made leaves nothing."""
    try:
        with open(path + ".new", "w") as file:
            file.write(text)
        os.rename(path + ".new", path)
    except OSError:
        try:
            os.unlink(path + ".new")
        except OSError:
            pass
        raise


def save():
    if rank == "0":
        note("saving", step)
        put(state, json.dumps({"step": step, "samples": step, "attempt": attempt}))
        note("saved", step)


def fail(error):
    note("fail", error.errno or 0)
    print(error, file=sys.stderr)
    sys.exit(1)


if options.get("deaf"):
    for number in (signal.SIGTSTP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
else:
    for number in (signal.SIGTSTP, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.append(1))
helper = None
if options.get("helper"):  # it ends it where it comes to its own end: else others have to
    helper = subprocess.Popen(["sleep", "299"], start_new_session=True)
try:
    if env["HPCSCHED_RESUME"] == "1":
        with open(state) as file:
            step = json.load(file)["step"]
    note("begin", step)
    if rank == "0" and not options.get("deaf"):
        put(f"{folder}/ready.{attempt}", "")
except OSError as error:
    fail(error)
pipe = int(env.get("HPCSCHED_PROGRESS_FD", "-1"))
if pipe >= 0:
    os.set_blocking(pipe, False)
while step < steps:
    time.sleep(options["pause"])
    step += 1
    note("step", step)
    if options.get("fails_at") == step and attempt <= options.get("times", 1):
        note("fail", 0)
        sys.exit(3)
    if options.get("takes_mib"):
        taken = bytearray(options["takes_mib"] << 20)
    try:
        if pipe >= 0 and rank == "0":
            os.write(pipe, (json.dumps({"step": step, "t": time.time()}) + "\n").encode())
    except OSError:
        pass
    try:
        if asked or os.path.exists(f"{folder}/stop.{attempt}") and not options.get("deaf"):
            save()
            note("left", step)
            sys.exit(75)
        if step % options.get("every", 10) == 0 and step < steps:
            save()
    except OSError as error:
        if asked or options.get("strict"):
            fail(error)
try:
    save()
except OSError as error:
    fail(error)
note("done", step)
if helper:
    helper.kill()
    helper.wait()
'''
"""Keeps the contract: saves every so many steps, and when it is asked to leave."""

SHELL = r"""
cd "$HPCSCHED_JOB_DIR" && read word < /proc/sys/kernel/random/uuid || exit 74
step=0; asked=
note() {
    read now _ < /proc/uptime
    echo "$word $HPCSCHED_ATTEMPT $$ $1 $2 $now" >> "{ledger}/$HPCSCHED_JOB_NAME"
}
save() {
    note saving $step
    printf '{"step": %d, "attempt": %d}' $step $HPCSCHED_ATTEMPT > STATE.new && mv STATE.new STATE.json || {
        rm -f STATE.new; note fail 0; exit 74; }
    note saved $step
}
trap 'asked=1' TSTP TERM; trap '' PIPE
[ "$HPCSCHED_RESUME" = 1 ] && step=$(sed 's/.*"step": *\([0-9]*\).*/\1/' STATE.json)
note begin $step
: > ready.$HPCSCHED_ATTEMPT
while [ $step -lt $HPCSCHED_STEPS ]; do
    sleep {pause}; step=$((step + 1)); note step $step
    echo "{\"step\": $step, \"t\": $(date +%s.%N)}" >&$HPCSCHED_PROGRESS_FD
    if [ "$asked" ]; then save; note left $step; kill -USR1 $HPCSCHED_NOTIFY_PID; exit 75; fi
    [ $((step % {every})) = 0 ] && save
done
save; note done $step
"""
"""The same in shell; `{ledger}`, `{pause}` and `{every}` are replaced."""

NOT_SAVED = 74
"""The exit code of the one in shell that cannot save."""

OWN_SAVES = r"""
import json, os, signal, sys, time

options = json.loads(sys.argv[1])
name, attempt = os.environ["HPCSCHED_JOB_NAME"], os.environ["HPCSCHED_ATTEMPT"]
word, step, asked = os.urandom(6).hex(), 0, []
ledger = os.open(options["ledger"] + "/" + name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def note(what, number):
    os.write(ledger, f"{word} {attempt} {os.getpid()} {what} {number} {time.monotonic():.3f}\n".encode())


def save():
    note("saving", step)
    os.makedirs(options["out"], exist_ok=True)
    path = f"{options['out']}/checkpoint-{step}"
    with open(path + ".new", "w") as file:
        file.write(str(step))
    os.rename(path + ".new", path)
    note("saved", step)


if options.get("catches"):
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
if len(sys.argv) > 3:
    with open(sys.argv[3]) as file:
        step = int(file.read())
note("begin", step)
while step < options["steps"]:
    time.sleep(options["pause"])
    step += 1
    note("step", step)
    print("step", step, flush=True)
    if asked:
        save()
        note("left", step)
        sys.exit(143)
    if options.get("every") and step % options["every"] == 0:
        save()
note("done", step)
"""
"""Knows only its job's name of hpcsched; saves by itself, or (without `every` and `catches`) not at all."""

TRIAL = r"""
import json, os, sys, time

options, lr, budget = json.loads(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
folder, trial = sys.argv[4:]
word, saved, step = os.urandom(6).hex(), folder + "/step", 0
flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
ledger = os.open(options["ledger"] + "/trial-" + trial, flags, 0o600)


def note(what, number):
    line = f"{word} {os.environ['HPCSCHED_ATTEMPT']} {os.getpid()} {what} {number} {time.monotonic():.3f}\n"
    os.write(ledger, line.encode())


if os.path.exists(saved):
    with open(saved) as file:
        step = int(file.read())
note("begin", step)
while step < budget:
    time.sleep(options["pause"])
    step += 1
    note("step", step)
    print(f"loss: {(lr - 0.3) ** 2 + 1 / (1 + step):.9f}", flush=True)
    note("saving", step)
    with open(saved + ".new", "w") as file:
        file.write(str(step))
    os.rename(saved + ".new", saved)
    note("saved", step)
if step >= budget:
    print(f"loss: {(lr - 0.3) ** 2 + 1 / (1 + step):.9f}", flush=True)
note("done", step)
"""
"""A training of a search: its loss is a function of its learning rate and its steps."""

TRAINER = r'''
import hashlib, os, time
import torch
from torch import nn
from hpcsched.worker import Parts, Trainer

class Small(Trainer):
    """Its weights come back as a number, the first bits of a checksum: they fit into a float exactly."""

    def build(self, args):
        word = os.urandom(6).hex()
        rank = os.environ.get("HPCSCHED_RANK", "0")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        ledger = os.open(f"{args['ledger']}/{args['name']}", flags, 0o600)
        generator = torch.Generator().manual_seed(args["seed"])
        x = torch.randn(64, 6, generator=generator)
        y = torch.randint(0, 3, (64,), generator=generator)
        torch.manual_seed(args["seed"])
        noise = nn.Dropout(0.2) if args.get("dropout", True) else nn.Identity()
        model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.ReLU(), noise, nn.Linear(24, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
        seen = [-1]

        def loss(model, batch):
            step = scheduler.last_epoch
            if rank == "0" and step != seen[0]:
                what = "begin" if seen[0] < 0 else "step"
                seen[0] = step
                line = f"{word} 0 {os.getpid()} {what} {step} {time.monotonic():.3f}\n"
                os.write(ledger, line.encode())
                time.sleep(args["pause"])
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

        def weights(model):
            found = hashlib.sha256()
            for name, value in sorted(model.state_dict().items()):
                found.update(name.encode() + value.detach().contiguous().numpy().tobytes())
            return {"weights": float(int.from_bytes(found.digest()[:6], "big"))}

        return Parts(model=model, optimizer=optimizer, scheduler=scheduler, dataset=(x, y), global_batch=8,
                     loss=loss, seed=args["seed"], evaluate=weights)
'''
"""A trainer: a line of its ledger says that so many steps are done, and the next one begins."""

"""Names of the environment variables that hpcsched gives to processes; what they mean: docs/contract.md."""

from __future__ import annotations

PREFIX = "HPCSCHED_"

# -- what an attempt is told -------------------------------------------------------------------------------

CONTRACT = "HPCSCHED_CONTRACT"
RUN_ID = "HPCSCHED_RUN_ID"
RUN_DIR = "HPCSCHED_RUN_DIR"
JOB_DIR = "HPCSCHED_JOB_DIR"
JOB_ID = "HPCSCHED_JOB_ID"
JOB_NAME = "HPCSCHED_JOB_NAME"
ARRAY_INDEX = "HPCSCHED_ARRAY_INDEX"
ATTEMPT = "HPCSCHED_ATTEMPT"
DEVICES = "HPCSCHED_DEVICES"
SEATS = "HPCSCHED_SEATS"
CHECKPOINT_DIR = "HPCSCHED_CHECKPOINT_DIR"
CHECKPOINT_EVERY_S = "HPCSCHED_CHECKPOINT_EVERY_S"
KEEP = "HPCSCHED_KEEP"
RESUME = "HPCSCHED_RESUME"
FROM_STEP = "HPCSCHED_FROM_STEP"
CONTINUES = "HPCSCHED_CONTINUES"
STEPS = "HPCSCHED_STEPS"
EPOCHS = "HPCSCHED_EPOCHS"
ARGS = "HPCSCHED_ARGS"
TRAINER = "HPCSCHED_TRAINER"
STRATEGY = "HPCSCHED_STRATEGY"
STANDIN = "HPCSCHED_STANDIN"
LANE = "HPCSCHED_LANE"
PACK = "HPCSCHED_PACK"
PACE = "HPCSCHED_PACE"
STORE_KEY = "HPCSCHED_STORE_KEY"

# -- what is added on its host, and for each rank ----------------------------------------------------------

NOTIFY_PID = "HPCSCHED_NOTIFY_PID"
LAUNCHED_AT = "HPCSCHED_LAUNCHED_AT"
JOINING = "HPCSCHED_JOINING"
CUDA_DEVICES = "HPCSCHED_CUDA_DEVICES"
DRIVER_VARIABLES = "HPCSCHED_DRIVER_VARIABLES"
RANK = "HPCSCHED_RANK"
WORLD_SIZE = "HPCSCHED_WORLD_SIZE"
LOCAL_RANK = "HPCSCHED_LOCAL_RANK"
PROGRESS_FD = "HPCSCHED_PROGRESS_FD"
CONTROL_FD = "HPCSCHED_CONTROL_FD"
ARENA_FD = "HPCSCHED_ARENA_FD"
PROGRESS_ID = "HPCSCHED_PROGRESS_ID"
CONTROL_ID = "HPCSCHED_CONTROL_ID"
ARENA_ID = "HPCSCHED_ARENA_ID"

# -- what other processes of hpcsched's are told -----------------------------------------------------------

NODE = "HPCSCHED_NODE"
ZYGOTE_FD = "HPCSCHED_ZYGOTE_FD"
LAYERS = "HPCSCHED_LAYERS"
VSW = "HPCSCHED_VSW"
PACKS = "HPCSCHED_PACKS"

# -- what a user's command is told of a message (`run --notify-command`) ------------------------------------

MESSAGE_KIND = "HPCSCHED_MESSAGE_KIND"
MESSAGE_TEXT = "HPCSCHED_MESSAGE_TEXT"

# -- what a user sets for an agent, and no job is told ------------------------------------------------------

NOTIFY_WEBHOOK = "HPCSCHED_NOTIFY_WEBHOOK"

# -- what a user may set for a job -------------------------------------------------------------------------

LANE_MEMORY_MIB = "HPCSCHED_LANE_MEMORY_MIB"
LANE_MODE = "HPCSCHED_LANE_MODE"
RANKS_BACKEND = "HPCSCHED_RANKS_BACKEND"

IDENTITIES = {PROGRESS_FD: PROGRESS_ID, CONTROL_FD: CONTROL_ID, ARENA_FD: ARENA_ID}
"""By the variable of a descriptor the one with "device:inode" of what was meant by it."""

OF_A_RANK = (RANK, WORLD_SIZE, LOCAL_RANK)
"""Behind a launcher these are the launcher's rank."""

OF_AN_ATTEMPT = frozenset(
    (
        *(CONTRACT, JOB_ID, JOB_NAME, ARRAY_INDEX, JOB_DIR, RUN_DIR, ATTEMPT, DEVICES, SEATS),
        *(NOTIFY_PID, LAUNCHED_AT),
        *(CHECKPOINT_DIR, CHECKPOINT_EVERY_S, KEEP, RESUME, FROM_STEP, CONTINUES, STEPS, EPOCHS, ARGS),
        *(TRAINER, STRATEGY, STANDIN, LANE, PACK, PACE, STORE_KEY, JOINING, CUDA_DEVICES, DRIVER_VARIABLES),
        *IDENTITIES.keys(),
        *IDENTITIES.values(),
    )
)
"""What an agent tells an attempt: true of that one only, and not of what another agent starts within it."""

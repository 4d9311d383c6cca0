"""What looks like a secret goes, and what does not stays."""

from __future__ import annotations

import json

import pytest

from hpcsched.redaction import REMOVED, is_secret, renamed, without_secrets

SECRET = "s3cr3t-V4lue"


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"env": {"WANDB_API_KEY": SECRET}}),
        json.dumps({"env": {"DB_PASSWORD": f'a"b\\{SECRET}'}}),
        f'{{"HF_TOKEN":"{SECRET}',  # cut off
        json.dumps(["train.py", "--api-key", SECRET]),
        json.dumps(["train.py", f"--auth-token={SECRET}"]),
        f"python train.py --token {SECRET} --lr 1",
        f"export AWS_SECRET_ACCESS_KEY={SECRET}; run",
        f"key = {SECRET}".replace(" = ", "="),
        f'password = "{SECRET}"',
        f"['--password', '{SECRET}']",
        f"https://me:{SECRET}@host/path",
        f"Authorization: Bearer {SECRET}",
        f"hf_{SECRET.replace('-', '')}aaaa",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_a_secret_is_taken_out(text: str) -> None:
    clean = without_secrets(text)
    assert SECRET not in clean and SECRET.replace("-", "") not in clean
    assert REMOVED in clean


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"keep_checkpoints": 3, "model": "monkey", "author": "ada", "tokens": 5}),
        "python train.py --lr 0.1 --keyboard us",
        "job 3 (monkey) starts on GPU 0",
        "https://host/path?x=1",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert without_secrets(text) == text


def test_what_is_left_of_a_document_is_still_one() -> None:
    document = {"env": {"A_TOKEN": 'x"y\\', "B": "1"}, "command": ["x", "--key", "v", "--lr", "2"]}
    clean = json.loads(without_secrets(json.dumps(document)))
    assert clean == {"env": {"A_TOKEN": REMOVED, "B": "1"}, "command": ["x", "--key", REMOVED, "--lr", "2"]}


def test_names_of_variables_are_told_apart() -> None:
    secret = ("HF_TOKEN", "WANDB_API_KEY", "PGPASSWORD", "MY_KEY", "apikey", "SSH_AUTH_SOCK")
    assert all(map(is_secret, secret))
    assert not any(
        map(is_secret, ("PATH", "OMP_NUM_THREADS", "MONKEY", "HPCSCHED_DIR", "CUDA_VISIBLE_DEVICES"))
    )


def test_names_are_replaced_as_whole_words_the_longest_first() -> None:
    names = {"/home/ada": "~", "ada": "USER", "": "nobody"}
    assert renamed("/home/ada/x of ada, not adamant", names) == "~/x of USER, not adamant"

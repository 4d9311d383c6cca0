"""What looks like a secret goes, and what does not stays."""

from __future__ import annotations

import json

import pytest

from hpcsched.redaction import REMOVED, document_without_secrets, is_secret, renamed, without_secrets

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
        f"TOKEN='{SECRET}' python t.py",
        f"export WANDB_API_KEY='a {SECRET}'",
        f"password = {SECRET}",
        f"password: {SECRET}",
        f"{{'password': '{SECRET}'}}",
        f"--token 'a {SECRET}'",
        json.dumps({"CONFIG": json.dumps({"api_key": SECRET})}),
        json.dumps({"command": ["sh", "-c", f'TOKEN="{SECRET}" python']}),
        json.dumps({"secrets": ["a", SECRET]}),
        f"DB_PASS={SECRET}",
        f"SLURM_JWT={SECRET}",
        f"SLACK_WEBHOOK_URL=https://host/{SECRET}",
        f"password=ab,{SECRET}",
        f"https://me:a@{SECRET}@host/path",
        f"https://me:a/{SECRET}@host/path",
        f"Cookie: a=1; session={SECRET}",
        f"Authorization: token {SECRET}",
        f"ghs_{SECRET.replace('-', '')}aaaa",
        f"eyJhbGciOiJIUzI1NiJ9.{SECRET}.x",
        f'Authorization: Digest username="x", response="{SECRET}"',
        f"{{'token': b'{SECRET}'}}",
        f'password="""{SECRET}"""',
        f'os.environ["TOKEN"] = "{SECRET}"',
        f'passwd=a"{SECRET}',
        f"TOKEN=a\\ {SECRET}",
        f'password := "{SECRET}"',
        f'{{"password": {{"a": "{SECRET}"}}}}',
        f"https://me:{'a' * 2000}{SECRET}@host/path",
        f"DB_PASS: {SECRET}",
        f"WANDB_KEY = {SECRET}",
        f"HF_TOKENS={SECRET}",
        f'encryptionKey: "{SECRET}"',
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
        "https://host/@ada",
        "    key = function(value)",
        "KeyError: 'lr'; 3 passed, tokenizer: gpt2, max_tokens=5, tokens_per_s: 7.5",
        json.dumps({"kind": "TimerFired", "key": ["drain", 0, 0], "at": 1.5}),
        "a == b; key == c",
        "token_loss: 1.2, val/token_acc=0.5, tokens=1.2k/s, token_count=5, pad_token_id=0, forward_pass=0.31",
        "keys=3, num_keys: 7, passes=2, key frame: none, tokens=[1, 2]",
        "train/token.py:12: no secret: yes",
        "PWD=/home/ada/runs",
        "MAX_TOKENS=512 python t.py --num-keys 3",
        json.dumps({"tokens_per_s": 7.5, "token_count": 3, "env": {"PWD": "/x"}, "use_token": True}),
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert without_secrets(text) == text


def test_what_is_left_of_a_document_is_still_one() -> None:
    document = {"env": {"A_TOKEN": 'x"y\\', "B": "1"}, "command": ["x", "--key", "v", "--lr", "2"]}
    clean = json.loads(without_secrets(json.dumps(document)))
    assert clean == {"env": {"A_TOKEN": REMOVED, "B": "1"}, "command": ["x", "--key", REMOVED, "--lr", "2"]}


def test_values_of_any_kind_go_from_documents_which_stay_documents() -> None:
    told = {
        "password": 123,
        "DB_PASS": 123,
        "secrets": ["a", {"b": 1}],
        "key": ["drain", 0],
        "token": None,
        "config": json.dumps({"api_key": "x", "lr": 0.1}),
        "command": ["t.py", "--token=a b", "--key", "v", "--lr", "2", "--keys", "3"],
        "t\u00f6ken": "stays",
        "env": {"MAX_TOKENS": "512", "MY_KEY": "512"},
    }
    clean = {
        **told,
        "password": REMOVED,
        "DB_PASS": REMOVED,
        "secrets": REMOVED,
        "config": json.dumps({"api_key": REMOVED, "lr": 0.1}),
        "command": ["t.py", f"--token={REMOVED}", "--key", REMOVED, "--lr", "2", "--keys", "3"],
        "env": {"MAX_TOKENS": "512", "MY_KEY": REMOVED},
    }
    lines = "".join(json.dumps(table) + "\n" for table in (told, {"n": 1}))
    found = document_without_secrets(lines + "TOKEN=x, not JSON\n" + json.dumps(told)[:20])
    first, second, third, _ = found.split("\n")
    assert json.loads(first) == clean and second == '{"n": 1}' and third == f"TOKEN={REMOVED} not JSON"
    assert json.loads(document_without_secrets(json.dumps(told, indent=1))) == clean


@pytest.mark.parametrize(
    "document",
    [
        json.dumps({"c": f"[a]\n-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----"}),
        json.dumps({"secrets": ["a", SECRET]}, indent=1)[2:],  # the end of a longer one
        f"{{PASSWORD='one\n{SECRET}'",
        json.dumps(["env", f"PASSWORD=correct {SECRET} battery"]),
        json.dumps(["--token", f"-{SECRET}"]),
    ],
)
def test_a_secret_of_several_lines_or_words_is_taken_out(document: str) -> None:
    assert SECRET not in document_without_secrets(document)


ANYTHING = (
    *(".", "key.", '"', "'", "\\", ":", "://", "a://b:", "=", "key=", "key='", "[", "{", "-", "x"),
    *("token: [", "--key ", "eyJ", "eyJ-", "sk-", "basic ", "key\\'", "key:   "),
    *("key:a", "key=>", "key: [", "token={", "key=1", 'token=a"', "token=\\", "x" * 20 + "://u"),
    "-----BEGIN PRIVATE KEY-----",
)


@pytest.mark.parametrize("piece", ANYTHING)
def test_much_of_anything_is_done_in_no_time(piece: str) -> None:
    """Rules that go back over what they have read would take hours."""
    text = piece * (2**17 // len(piece))
    assert len(document_without_secrets(text)) <= 20 * len(text)


def test_names_of_variables_are_told_apart() -> None:
    secret = ("HF_TOKEN", "WANDB_API_KEY", "PGPASSWORD", "MY_KEY", "apikey", "SSH_AUTH_SOCK")
    assert all(map(is_secret, secret))
    assert all(
        map(is_secret, ("DB_PASS", "AWS_KEYS", "SLURM_JWT", "A_WEBHOOK_URL", "DSN", "SIGNATURE", "myKey"))
    )
    assert not any(
        map(is_secret, ("PATH", "PWD", "OMP_NUM_THREADS", "MONKEY", "HPCSCHED_DIR", "CUDA_VISIBLE_DEVICES"))
    )


def test_names_are_replaced_as_whole_words_the_longest_first() -> None:
    names = {"/home/ada": "~", "ada": "USER", "": "nobody"}
    assert renamed("/home/ada/x of ada, not adamant", names) == "~/x of USER, not adamant"
    hosts = {"node-1": "HOST", "node-1.site.org": "HOST", "tux[1-2]": "HOST", "ada": "USER"}
    assert renamed("node-1.site.org, node-1: x-ada-1 on tux[1-2], node-12.", hosts) == (
        "HOST, HOST: x-USER-1 on HOST, node-12."
    )

#!/usr/bin/env bash
# The oldest environment that hpcsched-worker promises to run in: Python 3.9, torch 2.4. About 5 GB on disk and a
# few minutes; for the tests marked slow, which are told of it by HPCSCHED_TEST_PYTHONS.
#   packaging/old_env.sh [FOLDER]        .venv-old by default; OLD_PYTHON names another interpreter
set -euo pipefail
folder=${1:-.venv-old}
"${OLD_PYTHON:-python3.9}" -m venv "$folder"
"$folder/bin/python" -m pip install -q 'torch==2.4.*' 'numpy==1.26.*'
echo "HPCSCHED_TEST_PYTHONS=$(cd "$folder" && pwd)/bin/python make test-all"

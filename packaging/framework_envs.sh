#!/usr/bin/env bash
# Environments with the frameworks of examples/, one each, of the versions in packaging/frameworks/WHICH/NAME.txt; for
# `benchmarks/frameworks` and the slow tests of tests/integrations. About 1.5 GB and a minute each.
#   packaging/framework_envs.sh newest|oldest [NAME...]      all by default
#   PYTHON (python3) makes them, in FOLDER (.venv-frameworks)
set -euo pipefail
cd "$(dirname "$0")/.."
which=${1:?newest or oldest}
lists=packaging/frameworks/$which
shift
if [ $# = 0 ]; then
    set -- $(basename -s .txt -a "$lists"/*.txt)
fi
for name; do
    list=$lists/$name.txt
    made=${FOLDER:-.venv-frameworks}/$which/$name
    if [ -e "$made/made" ] && cmp -s "$list" "$made/made"; then
        continue
    fi
    "${PYTHON:-python3}" -m venv --clear "$made"
    "$made/bin/python" -m pip --disable-pip-version-check install -q -c constraints.txt -r "$list"
    cp "$list" "$made/made"
done

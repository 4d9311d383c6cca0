#!/usr/bin/env bash
# Environments with the frameworks of examples/, one each, of the versions in packaging/frameworks/NAME.txt; for
# `benchmarks/frameworks` and the slow tests of tests/integrations. About 1.5 GB and a minute each.
#   packaging/framework_envs.sh [NAME...]      all by default; PYTHON and FOLDER (.venv-frameworks) can be set
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${FOLDER:-.venv-frameworks}
if [ $# = 0 ]; then
    set -- $(basename -s .txt -a packaging/frameworks/*.txt)
fi
for name; do
    list=packaging/frameworks/$name.txt
    if [ -e "$folder/$name/made" ] && cmp -s "$list" "$folder/$name/made"; then
        continue
    fi
    "${PYTHON:-python3}" -m venv --clear "$folder/$name"
    "$folder/$name/bin/python" -m pip --disable-pip-version-check install -q -c constraints.txt -r "$list"
    cp "$list" "$folder/$name/made"
done

#!/usr/bin/env bash
# Install hpcsched for all users of a site: APPS/hpcsched/VERSION, with a Python environment of its own, and its
# module. Takes the versions in packaging/requirements.txt, and only files with the hashes that stand there.
#   packaging/install.sh WHEEL APPS
#   PYTHON (python3) runs it; MODULES (APPS/modulefiles) takes the module; WHEELS=FOLDER installs without a network,
#   from the files in FOLDER; SITE=FILE is the site's settings file of this installation, wherever it lies
set -euo pipefail
wheel=${1:?the wheel, such as dist/hpcsched-*-py3-none-any.whl} apps=${2:?the folder of applications}
here=$(cd "$(dirname "$0")" && pwd)
version=$(basename "$wheel" | cut -d- -f2)
mkdir -p "$apps"
prefix=$(cd "$apps" && pwd)/hpcsched/$version
modules=${MODULES:-$(cd "$apps" && pwd)/modulefiles}/hpcsched
if [ -e "$prefix" ]; then
    echo "$prefix is there already: runs may use it; remove it first" >&2
    exit 2
fi
trap 'rm -rf "$prefix"' ERR # half an installation is none
"${PYTHON:-python3}" -m venv "$prefix/venv"
pip=("$prefix/venv/bin/python" -m pip --disable-pip-version-check install -q)
offline=()
if [ -n "${WHEELS:-}" ]; then
    offline=(--no-index --find-links "$WHEELS")
fi
"${pip[@]}" "${offline[@]}" --only-binary :all: --require-hashes -r "$here/requirements.txt"
"${pip[@]}" --no-index --no-deps "$wheel"
mkdir -p "$prefix/bin" "$modules"
ln -s ../venv/bin/hpcsched "$prefix/bin/hpcsched"
ln -s venv/share "$prefix/share"
if [ -n "${SITE:-}" ]; then
    mkdir -p "$prefix/venv/etc/hpcsched"
    ln -s "$(realpath -m "$SITE")" "$prefix/venv/etc/hpcsched/config.toml"
fi
sed "s|@VERSION@|$version|g; s|@PREFIX@|$prefix|g" "$here/modulefile.tcl" >"$modules/$version"
"$prefix/bin/hpcsched" --version
echo "module use ${modules%/hpcsched} && module load hpcsched/$version"

#!/usr/bin/env bash
# make-venv.sh PYTHON FOLDER: make a virtual environment, also on a Debian without python3-venv.
set -euo pipefail
python=$1 folder=$2
[ -x "$folder/bin/python" ] && "$folder/bin/python" -m pip --version >/dev/null 2>&1 && exit 0
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "fp8watch needs Python 3.11 or newer; $python is $("$python" --version)" >&2
    exit 1
}
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing python3-venv"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv
    else
        echo "this Python cannot make virtual environments: run apt-get install python3-venv as root, then try again" >&2
        exit 1
    fi
fi
rm -rf "$folder"
"$python" -m venv "$folder"

#!/bin/sh
# Installs cfp from this folder, without any network: sh install.sh ENVIRONMENT [PYTHON]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
environment=${1:?usage: sh install.sh ENVIRONMENT [PYTHON]}
wanted=$(sed -n 's/.*"python": "\(.*\)".*/\1/p' "$here/wheelhouse.json")
python=${2:-python$wanted}

if ! "$python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$wanted')"
then
    echo "These wheels are for Python $wanted, and $python is not that or does not run." >&2
    echo "Name one: sh install.sh $environment /path/to/python$wanted" >&2
    exit 1
fi
(cd "$here" && sha256sum --quiet --check SHA256SUMS)
# pip runs from its wheel: a Python of Debian's comes without one for environments.
"$python" -m venv --without-pip "$environment"
pip=$(echo "$here"/wheels/pip-*.whl)
env -u PYTHONPATH -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null \
    "$environment/bin/python" "$pip/pip" install --quiet --disable-pip-version-check \
    --no-index --no-deps --find-links "$here/wheels" --require-hashes -r "$here/lock.txt"
echo "Installed. See what works: $environment/bin/cfp doctor"

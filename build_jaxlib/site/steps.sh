#!/bin/sh
# What the container recipes do, as root in a fresh Debian or Ubuntu; the wheelhouse lies in
# /wheelhouse. Only the system's own packages come over the network.
set -eu
if ! command -v make >/dev/null || ! python3 -c 'import venv' 2>/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update
    apt-get install --yes --no-install-recommends make python3
    rm -rf /var/lib/apt/lists/*
fi
sh /wheelhouse/install.sh /opt/cfp /usr/bin/python3
ln -sf /opt/cfp/bin/cfp /usr/local/bin/cfp
/opt/cfp/bin/cfp doctor --only graft --only packages

#!/bin/sh
# Sees to Debian packages: here already, installed now, or else it says so and fails.
if dpkg --status "$@" >/dev/null 2>&1; then
    echo "cross tools: here already"
elif { apt-get update && apt-get install --yes --no-install-recommends "$@"; } \
    >/dev/null 2>&1 </dev/null; then
    echo "cross tools: installed"
else
    echo "cross tools: cannot be installed here ($*)"
    exit 1
fi

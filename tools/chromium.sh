#!/bin/sh
# Make sure that there is a Chromium for the browser tests: tools/chromium.sh [--check]
#
# Installs Debian's, as root or with passwordless sudo. With --check, only says whether there is one.
for name in chromium chromium-browser google-chrome; do
    command -v "$name" > /dev/null && exit 0
done
test "${1:-}" != --check && command -v apt-get > /dev/null || exit 1
as_root=
if test "$(id -u)" -ne 0; then
    sudo -n true 2> /dev/null || exit 1
    as_root=sudo
fi
$as_root env DEBIAN_FRONTEND=noninteractive sh -c \
    'apt-get update -q && apt-get install -q -y --no-install-recommends chromium' && command -v chromium > /dev/null

#!/bin/sh
# Install packages into a virtual environment: tools/install.sh VENV REQUIREMENT...
#
# uv takes a sixth of pip's time. pip takes over where uv is missing or cannot reach the configured index.
bin=$1/bin
shift
"$bin/uv" pip install --quiet --python "$bin/python" "$@" ||
    "$bin/python" -m pip install --quiet --disable-pip-version-check "$@"

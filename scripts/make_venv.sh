#!/usr/bin/env bash
# Makes or updates a virtual environment with torch and this checkout of z3ext.
#
#   scripts/make_venv.sh FOLDER EXTRAS [REQUIREMENT ...]
#
# EXTRAS are z3ext's, with commas between them; '' for none. REQUIREMENTs are installed too.
# From the environment:
#   PYTHON  the interpreter that makes the environment (default: python3)
#   TORCH   pip requirement of torch. By default torch 2.13.0: its CPU build where this machine has
#           no NVIDIA GPU and pip's indexes offer that build. A torch that is in the environment
#           already stays.
#
# Nothing is built or downloaded when FOLDER holds this state of the sources already.
set -euo pipefail

if (($# < 2)); then
  sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
folder=$1
extras=$2
requirements=("${@:3}")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
torch=${TORCH:-}
torch_version=2.13.0

say() { printf '%s\n' "$*" >&2; }
fail() {
  say "make_venv: $*"
  exit 1
}

# What goes into z3ext's package.
sources=()
for name in pyproject.toml setup.py MANIFEST.in README.md LICENSE CMakeLists.txt csrc z3ext; do
  if [[ -e $root/$name ]]; then sources+=("$name"); fi
done

state_of_sources() {
  (cd "$root" && find "${sources[@]}" -type f ! -name '*.pyc' -print0 \
    | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1)
}

make_environment() {
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || fail "$python is missing or older than Python 3.10; set PYTHON to a newer one"
  say "Making the virtual environment $folder ..."
  "$python" -m venv "$folder" \
    || fail "$python has no working venv module (Debian and Ubuntu: install python3-venv)"
}

pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

install_torch() {
  if [[ -n $torch ]]; then
    say "Installing $torch ..."
    pip install -qq "$torch"
  elif "$folder/bin/python" -c 'import torch' 2>/dev/null; then
    return
  elif has_gpu; then
    say "Installing torch $torch_version for the GPU (a download of several GB) ..."
    pip install -qq "torch==$torch_version"
  else
    say "Installing torch $torch_version for the CPU ..."
    if ! pip install -qq "torch==$torch_version+cpu" 2>/dev/null; then
      say "  pip's indexes have no build for the CPU alone: taking their torch $torch_version. If that"
      say "  is a large CUDA build, stop, and set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds."
      pip install -qq "torch==$torch_version"
    fi
  fi
}

install_z3ext() {
  # A copy, so that the checkout stays clean and two environments can be made at a time.
  local copy
  copy=$(mktemp -d)
  # shellcheck disable=SC2064  # the folder's name is to be expanded now
  trap "rm -rf '$copy'" EXIT
  (cd "$root" && cp -R "${sources[@]}" "$copy")
  say "Installing z3ext${extras:+ and what '$extras' needs} ..."
  # DeepSpeed builds from source, and asks the torch that is here what to build for.
  pip install -qq setuptools wheel
  pip install -qq --no-build-isolation "$copy${extras:+[$extras]}" "${requirements[@]}"
}

# The stamp: the state of the sources, then a line for everything installed on top of that state.
stamp=$folder/.z3ext-installed
wanted="extras=$extras requirements=${requirements[*]-} torch=$torch"
state=$(state_of_sources)
if [[ -f $stamp && $(head -n 1 "$stamp") == "$state" ]] && grep -qxF "$wanted" "$stamp"; then
  exit 0
fi
[[ -x $folder/bin/python ]] || make_environment
install_torch
install_z3ext
if [[ ! -f $stamp || $(head -n 1 "$stamp") != "$state" ]]; then printf '%s\n' "$state" >"$stamp"; fi
printf '%s\n' "$wanted" >>"$stamp"

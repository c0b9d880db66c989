# Sourced by the other scripts: makes .venv beside this checkout once and activates it.
#   . tools/venv.sh EXTRA [PACKAGE...]     e.g.  . tools/venv.sh dev
# Honours PYTHON (an interpreter >= 3.12). A second call with an unchanged setup.py installs nothing.
bp_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bp_find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 python3.13 python3 "$HOME"/.pyenv/versions/3.12*/bin/python; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "No Python >= 3.12 found (megatron-core needs it). Install one, or run with PYTHON=/path/to/python3.12." >&2
  return 1
}
bp_make_venv() {
  local extra=$1 python stamp want
  shift
  if [ ! -x "$bp_root/.venv/bin/python" ]; then
    python=$(bp_find_python) || return 1
    echo "== making .venv with $("$python" --version)"
    "$python" -m venv "$bp_root/.venv" || return 1
  fi
  stamp=$bp_root/.venv/.installed-$extra
  want="$(cksum <"$bp_root/setup.py") $*"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    echo "== installing megatron_bp[$extra] $* (the first time downloads about 3 GB)"
    "$bp_root/.venv/bin/python" -m pip install --quiet --upgrade-strategy only-if-needed \
      -e "$bp_root[$extra]" || return 1
    if [ $# -gt 0 ]; then
      "$bp_root/.venv/bin/python" -m pip install --quiet --no-deps "$@" || return 1
    fi
    echo "$want" >"$stamp"
  fi
}
bp_make_venv "$@" || exit 1
PATH="$bp_root/.venv/bin:$PATH"
export PATH
